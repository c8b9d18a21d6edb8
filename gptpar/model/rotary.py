"""Rotary position embedding: pairs of channels of queries and keys turn with a token's position.

Legend: B batch, S sequence, H heads, K head width, R pairs of channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gptpar.config import ModelConfig


@dataclass(frozen=True)
class Rotary:
    """A model's rotary frequencies: how positions turn its heads.

    A model that was trained on short samples reads longer ones if its frequencies are scaled. With ``factor`` f,
    ``context`` C and the plain frequency of a pair of channels:

    - ``linear`` (Chen et al. 2023): every frequency is divided by f.
    - ``dynamic`` (NTK-aware): the base is multiplied by (f x length / C - f + 1) ^ (rotated / (rotated - 2)) where the
      samples are longer than C. Transformers takes the longest sequence so far for ``length``; here it is
      ``--seq-length``, so that a text's logits do not depend on the texts beside it.
    - ``llama3`` (Grattafiori et al. 2024): a frequency with at most ``turns[0]`` turns in C tokens is divided by f, one
      with at least ``turns[1]`` is kept, and one in between is a mean of both, with weights linear in its turns.
    - ``yarn`` (Peng et al. 2023): the same, but the weights are linear in the number of the pair, and queries and keys
      are multiplied by ``amplitude``.

    Attributes:
        rotated: how many channels of a head are turned, an even number; the others stay as they are.
        base: the plain frequencies are ``base ** (-2i / rotated)`` radians a token.
        scaling: a kind above, or ``None``.
        factor, context, turns, length: see above.
        rounds: (``yarn``) whether the first and last pair of the ramp are whole numbers.
        amplitude: factor of cosine and sine.
    """

    rotated: int
    base: float
    scaling: str | None = None
    factor: float = 1.0
    context: int = 0
    turns: tuple[float, float] = (1.0, 1.0)
    length: int = 0
    rounds: bool = True
    amplitude: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig) -> Rotary | None:
        """The frequencies of a model; ``None`` if it has other positions."""
        if config.position_embedding_type != "rope":
            return None
        kind, factor = config.rope_scaling_type, config.rope_scaling_factor
        turns, amplitude = (config.low_freq_factor, config.high_freq_factor), 1.0
        if kind == "yarn":
            turns = config.yarn_beta_slow, config.yarn_beta_fast
            amplitude = config.yarn_attention_factor or yarn_amplitude(factor)
        return cls(
            int(config.kv_channels * config.rotary_percent),
            config.rotary_base,
            kind,
            factor,
            config.original_max_position_embeddings or 0,
            turns,
            config.seq_length,
            config.yarn_correction_range_round_to_int,
            amplitude,
        )

    def frequencies(self, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """frequencies_R, R = rotated / 2, in radians a token.

        Args:
            dtype: number format of the computation, fp32 or fp64.
        """
        base = self.base
        if self.scaling == "dynamic" and self.length > self.context:
            stretch = self.factor * self.length / self.context - (self.factor - 1)
            base = base * stretch ** (self.rotated / (self.rotated - 2))
        exponents = torch.arange(0, self.rotated, 2, dtype=dtype, device=device) / self.rotated
        plain_R: torch.Tensor = base**-exponents
        match self.scaling:
            case "linear":
                return plain_R / self.factor
            case "llama3":
                (low, high), turns_R = self.turns, plain_R * (self.context / (2 * math.pi))
                kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
            case "yarn":
                first, last = self._ramp()
                pairs_R = torch.arange(self.rotated // 2, dtype=dtype, device=device)
                kept_R = 1 - ((pairs_R - first) / (last - first)).clamp(0, 1)
            case _:
                return plain_R
        return (1 - kept_R) * plain_R / self.factor + kept_R * plain_R

    def _ramp(self) -> tuple[float, float]:
        """The pairs between which the weights of ``yarn`` fall: those of the most and of the fewest turns."""
        first, last = (
            self.rotated * math.log(self.context / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in reversed(self.turns)
        )
        if self.rounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotated - 1)
        return first, last + 0.001 * (first == last)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of queries and of keys, which makes softmax as sharp in a longer context (Peng et al. 2023)."""
    return 1 + 0.1 * scale * math.log(factor)


def rotate(
    heads: Iterable[torch.Tensor], positions_BS: torch.Tensor | None, rotary: Rotary
) -> tuple[torch.Tensor, ...]:
    """Rotary position embedding (Su et al. 2021) on the first channels of each head.

    Channels i and i + rotated/2 form a pair (GPT-NeoX's and Megatron's convention), turned by the angle
    position x frequency; angles are computed in fp32, or in fp64 where the heads have it.

    Args:
        heads: tensors x_BHSK of one length, number format and device, for instance queries and keys.
        positions_BS: each token's position; ``None``: 0, 1, 2, ...

    Returns:
        The turned tensors, in the shapes of ``heads``.
    """
    first_BHSK, *_ = heads = tuple(heads)
    device, length, rotated = first_BHSK.device, first_BHSK.shape[2], rotary.rotated
    exact = torch.promote_types(first_BHSK.dtype, torch.float32)
    frequencies_R = rotary.frequencies(device, exact)
    positions = torch.arange(length, device=device)[None] if positions_BS is None else positions_BS
    angles_B1SR = (positions[:, :, None].to(exact) * frequencies_R)[:, None]
    table = compiled_cos_and_sin if torch.compiler.is_compiling() else cos_and_sin
    cos, sin = table(angles_B1SR, rotary.amplitude, first_BHSK.dtype)

    def turned(x_BHSK: torch.Tensor) -> torch.Tensor:
        first, second, rest = x_BHSK.split([rotated // 2, rotated // 2, x_BHSK.shape[-1] - rotated], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    return tuple(turned(x_BHSK) for x_BHSK in heads)


def cos_and_sin(angles: torch.Tensor, amplitude: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines) of the angles in a number format, times the amplitude."""
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1:
        cos, sin = cos * amplitude, sin * amplitude
    return cos.to(dtype), sin.to(dtype)


# An operator, into which torch.compile cannot look: it would compute both functions again for each channel of each
# head, which takes longer than the heads' memory traffic (H100, 4 layers of Qwen2.5-7B: 10 ms of a step of 555).
compiled_cos_and_sin = torch.library.custom_op("gptpar::cos_and_sin", cos_and_sin, mutates_args=())


@compiled_cos_and_sin.register_fake
def _(angles: torch.Tensor, amplitude: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(angles, dtype=dtype), torch.empty_like(angles, dtype=dtype)
