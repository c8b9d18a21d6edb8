"""Text from a model: through the cache of keys and values it is the text that is computed anew for each token."""

import pytest
import torch

from gptpar.model.gpt import gpt_model
from gptpar.model.key_value_cache import cached
from gptpar.pipeline import Stage
from gptpar.run.sampling import Sampling, continue_texts, make_texts
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, tiny_config

CONTEXT, VOCAB = 16, 60
OPTIONS = {
    "gpt2": "",
    "norms over the width": "--qk-layernorm --qk-layernorm-scope width --normalization RMSNorm --num-query-groups 2",
    "layers without positions": "--position-embedding-type rope --no-rope-freq 2 --window-size 5 --window-pattern FS",
    "dynamic positions": "--position-embedding-type rope --rope-scaling-type dynamic "
    "--original-max-position-embeddings 4",
    "post-norm": "--norm-placement post --normalization RMSNorm --swiglu",
    "gate, parallel residual, softcap": "--attention-output-gate --use-parallel-residual --logit-softcap 2 "
    "--untie-embeddings-and-output-weights",
}


def stage_of(flags: str, dtype: torch.dtype = torch.float64) -> Stage:
    stage = Stage(gpt_model(tiny_config(flags).model).specs)
    values = {name: torch.empty(info.full_shape, dtype=dtype) for name, info in stage.infos().items()}
    stage.place(values)
    initialise(values, inits_of_stage(stage), 1)
    for number, value in enumerate(values.values()):  # the initial values of norms and biases hide what is left out
        value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(number), dtype=dtype)
    return stage.eval().requires_grad_(False)


def whole(stage: Stage, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens of each row."""
    return stage(ids, {"seq_length": ids.shape[1]}).view(*ids.shape, -1)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_through_the_cache_are_those_without(name: str) -> None:
    stage = stage_of(OPTIONS[name])
    ids = torch.randint(0, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(3))
    wanted = whole(stage, ids)
    starts = [1, 7, 4]  # tokens of each prompt
    with cached(stage, 3, CONTEXT) as place:
        for row, length in enumerate(starts):
            place.rows, place.positions_BS = slice(row, row + 1), None
            first = whole(stage, ids[row : row + 1, :length])
            torch.testing.assert_close(first[0], wanted[row, :length], rtol=1e-10, atol=1e-12)
        for step in range(CONTEXT - max(starts)):
            positions = torch.tensor(starts) + step
            place.rows, place.positions_BS, place.length = slice(None), positions[:, None], int(positions.max()) + 1
            tokens = ids[torch.arange(3), positions][:, None]
            logits = stage(tokens, {"seq_length": 1, "position_ids": place.positions_BS})
            torch.testing.assert_close(logits, wanted[torch.arange(3), positions], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole(stage, ids), wanted, rtol=0, atol=0)  # all is as before


def made(stage: Stage, prompts: list[list[int]], **options: object) -> list[list[int]]:
    how = Sampling(**{"num_tokens": 20, "context": CONTEXT, "vocab_size": VOCAB} | options)  # type: ignore[arg-type]
    texts = make_texts(prompts, how)
    for _ in continue_texts(stage, texts, how):
        pass
    return [text.made for text in texts]


PROMPTS = [[1, 2, 3], list(range(14)), list(range(30))]


def test_texts_do_not_depend_on_the_cache_nor_on_other_prompts_and_end_by_themselves() -> None:
    """Also those that grow beyond the context, and one that is longer from the start."""
    stage = stage_of("--position-embedding-type rope")
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.7}
    together = made(stage, PROMPTS, **options)
    assert together == made(stage, PROMPTS, use_cache=False, **options)
    assert together == [made(stage, [prompt], **options)[0] for prompt in PROMPTS]
    assert all(len(text) == 20 for text in together) and len({tuple(text) for text in together}) == 3
    stop = together[0][3]
    for ended, text in zip(made(stage, PROMPTS, stop_at=stop, **options), together, strict=True):
        assert ended == text[: text.index(stop) + 1 if stop in text else 20]
    (greedy,) = made(stage, PROMPTS[:1], temperature=0.0)
    (ended,) = made(stage, PROMPTS[:1], temperature=0.0, stop_at=greedy[3])
    assert ended == greedy[: greedy.index(greedy[3]) + 1]


def test_sampled_tokens_of_a_seed_stay_what_they_were() -> None:
    """As the first version drew them: all logits of the window anew, one generator, one draw a token."""
    stage = stage_of("", torch.float32)
    generator, tokens = torch.Generator().manual_seed(7), [1, 2, 3]
    for _ in range(20):
        logits = whole(stage, torch.tensor([tokens[-CONTEXT:]]))[0, -1, :VOCAB]
        logits = (logits - logits.max()) / 0.9
        logits[logits < logits.topk(10).values[-1]] = -torch.inf
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    assert made(stage, [[1, 2, 3]], seed=7, temperature=0.9, top_k=10) == [tokens[3:]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.9, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_likeliest(top_p: float, kept: int) -> None:
    how, generator = Sampling(1, CONTEXT, 4, top_p=top_p), torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert {how.choose(logits, generator) for _ in range(300)} == set(range(kept))
