"""Continues prompts with a trained model, token after token: temperature, top-k and top-p, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gptpar.model.key_value_cache import CachePlace, cached
from gptpar.pipeline.stage import Stage


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are chosen.

    Attributes:
        num_tokens: the most tokens that are added to a prompt.
        context: the model's sequence length; older tokens are forgotten.
        vocab_size: padding rows of the output beyond this are never chosen.
        temperature: 0 takes the likeliest token.
        top_k: choose among the k likeliest only; 0 among all.
        top_p: choose among the fewest likeliest whose probabilities add up to p (Holtzman et al. 2019), after top_k.
        stop_at: the id after which a text is complete.
        seed: seed of each prompt, so that its continuation does not depend on the other prompts.
        use_cache: whether keys and values are kept; otherwise each token is computed from the whole context anew.
    """

    num_tokens: int
    context: int
    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_at: int | None = None
    seed: int = 1234
    use_cache: bool = True

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """A token from its logits."""
        logits = logits_V[: self.vocab_size].float().cpu()
        if self.temperature < torch.finfo(logits.dtype).tiny:  # nothing to divide by: the limit of ever lower ones
            return int(logits.argmax())
        logits = (logits - logits.max()) / self.temperature  # at most 0, so that no temperature overflows
        if self.top_k:
            logits[logits < logits.topk(min(self.top_k, self.vocab_size)).values[-1]] = -torch.inf
        if self.top_p < 1:
            likeliest, order = logits.softmax(-1).sort(descending=True)
            before = likeliest.cumsum(-1) - likeliest  # the likeliest of all is always kept
            logits[order[before >= self.top_p]] = -torch.inf
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


@dataclass
class Continuation:
    """A prompt and what has been added to it.

    Attributes:
        tokens: number of tokens of both; must not be 0.
        is_complete: whether nothing more is added. Whoever reads the tokens may set it, too.
    """

    tokens: list[int]
    generator: torch.Generator
    num_prompt: int = field(init=False)
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def made(self) -> list[int]:
        """The added tokens."""
        return self.tokens[self.num_prompt :]


def make_texts(prompts: Sequence[Sequence[int]], how: Sampling) -> list[Continuation]:
    """Make texts that :func:`continue_texts` continues, of encoded prompts."""
    return [Continuation(list(prompt), torch.Generator().manual_seed(how.seed)) for prompt in prompts]


@torch.no_grad()
def continue_texts(stage: Stage, texts: Sequence[Continuation], how: Sampling) -> Iterator[None]:
    """Add a token to each text that is not complete, again and again; control returns after each time.

    While a text fits the context, its keys and values are kept, and all such texts are computed together. A longer
    text forgets its oldest tokens, so that all others have new positions: its context is computed anew each time.
    """
    longest = max(text.num_prompt for text in texts) + how.num_tokens
    with cached(stage, len(texts), min(longest, how.context)) as place:
        decoder = _Decoder(stage, place, how.context, how.use_cache)
        for step in range(how.num_tokens):
            alive = [number for number, text in enumerate(texts) if not text.is_complete]
            if not alive:
                return
            logits = decoder.logits(texts, alive, first=step == 0)
            for number, logits_V in zip(alive, logits, strict=True):
                text = texts[number]
                text.tokens.append(how.choose(logits_V, text.generator))
                text.is_complete = text.tokens[-1] == how.stop_at
            yield


@dataclass(frozen=True)
class _Decoder:
    """Logits of the next tokens, through the cache where the texts fit it."""

    stage: Stage
    place: CachePlace
    context: int
    use_cache: bool

    def logits(self, texts: Sequence[Continuation], alive: Sequence[int], *, first: bool) -> list[torch.Tensor]:
        """Logits [V] of the next token of each text that is not complete."""
        fits = {number for number in alive if self.use_cache and len(texts[number].tokens) <= self.context}
        if first or not fits:
            return [self._whole(texts[number].tokens, number if number in fits else None) for number in alive]
        together = self._next(texts)
        return [together[number] if number in fits else self._whole(texts[number].tokens, None) for number in alive]

    def _whole(self, tokens: Sequence[int], row: int | None) -> torch.Tensor:
        """Logits after all tokens of a context, which begin a row of the cache, if there is one for them."""
        self.place.rows = None if row is None else slice(row, row + 1)
        self.place.positions_BS = None
        return self._forward(torch.tensor([tokens[-self.context :]]))[-1]

    def _next(self, texts: Sequence[Continuation]) -> torch.Tensor:
        """Logits [R, V] after the last token of each text; rows of texts that have left the cache have no meaning."""
        room = min(max(len(text.tokens) for text in texts), self.context)
        positions_R = torch.tensor([min(len(text.tokens), room) - 1 for text in texts])
        self.place.rows, self.place.length = slice(None), room
        self.place.positions_BS = positions_R[:, None].to(self._device)
        tokens_R1 = torch.tensor([text.tokens[-1:] for text in texts])
        return self._forward(tokens_R1, position_ids=self.place.positions_BS)

    @property
    def _device(self) -> torch.device:
        return next(self.stage.parameters()).device

    def _forward(self, tokens_BS: torch.Tensor, **fields: Any) -> torch.Tensor:
        return self.stage(tokens_BS.to(self._device), {"seq_length": tokens_BS.shape[1], **fields})
