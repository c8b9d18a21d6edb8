"""Dropout's masks: fair, independent of each other, and functions of what they may depend on alone."""

from collections.abc import Callable
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F

from gptpar.model.block import Block
from gptpar.model.core_attention import (
    AttentionDropout,
    AttentionRule,
    _dropout_in_kernel,
    _dropout_in_memory,
    document_mask,
)
from gptpar.model.dropout import (
    EMBEDDINGS,
    KINDS,
    MLP_OUTPUT,
    PROBABILITIES,
    HiddenDropout,
    LayerSeeds,
    kept,
    layers_with_dropout,
    seed_fields,
    seeds_field,
)
from gptpar.system.hashes import seed_of
from gptpar.tensor_parallel import TensorAxis
from tests.helpers import random_tokens
from tests.unit.model.stages import stage_of

CPU = torch.device("cpu")
GROUPS, QUERIES, LENGTH, BATCH = 4, 2, 32, 3
BOTH = "--hidden-dropout 0.2 --attention-dropout 0.3"


def seeds_of(layer: str = "layers.0", iteration: int = 0, place: int = 0) -> LayerSeeds:
    return seed_fields([layer], 1234, iteration, place, CPU)[seeds_field(layer)]


def deviations(kept_: torch.Tensor, p: float) -> torch.Tensor:
    """fp64 of mean 0 and variance 1 if the elements are fair."""
    return (kept_.double() - (1 - p)) / (p * (1 - p)) ** 0.5


def z_score(products: torch.Tensor) -> float:
    """How many standard deviations the mean of independent numbers of mean 0 and variance 1 is off."""
    return abs(products.mean().item()) * products.numel() ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.5])
def test_masks_are_fair_and_neighbours_independent(p: float) -> None:
    """The share that is kept, and products of elements some rows and columns apart: within 5 standard deviations."""
    x = deviations(kept(seeds_of().words[EMBEDDINGS], torch.arange(1000, dtype=torch.int32), 512, p), p)
    assert z_score(x) < 5
    for shift in (1, 2, 3, 4, 8, 16, 64, 128, 256):
        assert z_score(x[shift:] * x[:-shift]) < 5 and z_score(x[:, shift:] * x[:, :-shift]) < 5
        assert z_score(x[shift:, shift:] * x[:-shift, :-shift]) < 5
        assert z_score(x * x[:, torch.arange(512) ^ shift]) < 5 * 2**0.5  # each product twice
    for sums, terms in ((x.sum(0), 1000), (x.sum(1), 512)):  # no column or row has more than its share
        assert abs(sums.square().mean().item() / terms - 1) < 5 * (2 / sums.numel()) ** 0.5


def test_masks_of_layers_kinds_micro_batches_and_iterations_are_independent() -> None:
    rows = torch.arange(256, dtype=torch.int32)
    seeds = [seeds_of(), seeds_of("layers.1"), seeds_of(iteration=1), seeds_of(place=1)]
    masks = [kept(s.words[kind], rows, 256, 0.3) for s in seeds for kind in range(len(KINDS))]
    for one, other in combinations(masks, 2):
        assert z_score(deviations(one, 0.3) * deviations(other, 0.3)) < 5


def test_masks_are_stable() -> None:
    """A change here would silently change every run with dropout."""
    words = torch.tensor([[1, 2], [-5, 2**31 - 1]], dtype=torch.int32)
    rows = torch.tensor([0, 7, 2**31 - 1], dtype=torch.int32)
    assert [crc32(kept(one, rows, 300, 0.3).numpy().tobytes()) for one in words] == [549918943, 1439489013]
    assert kept(words[0], rows, 100, 1e-12).all() and not kept(words[0], rows, 100, 1 - 1e-12).any()
    assert seeds_of().host[PROBABILITIES] == seed_of(1234, "dropout", 0, 0, "layers.0", "attention probabilities")
    assert seeds_of().words.flatten().view(torch.int64).tolist() == seeds_of().host.tolist()


def test_a_rank_with_some_tokens_has_their_rows_of_the_mask() -> None:
    x = torch.randn(12, 8)
    whole = HiddenDropout(0.5, MLP_OUTPUT)(x, seeds_of())
    ranks = [HiddenDropout(0.5, MLP_OUTPUT, TensorAxis(3, rank, sequence_parallel=True)) for rank in range(3)]
    shares = [dropout(part, seeds_of()) for dropout, part in zip(ranks, x.chunk(3), strict=True)]
    assert torch.equal(torch.cat(shares), whole)
    assert torch.equal(HiddenDropout(0.5, MLP_OUTPUT, TensorAxis(3, 2))(x, seeds_of()), whole)


Attend = Callable[..., torch.Tensor]
METHODS = pytest.mark.parametrize(
    "attend", [pytest.param(_dropout_in_memory, id="plain"), pytest.param(_dropout_in_kernel, id="one call a group")]
)


def rule_of(p: float, first_group: int = 0) -> AttentionRule:
    return AttentionRule(dropout=AttentionDropout(p, seeds_of(), first_group, GROUPS))


def queries_keys_values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = LENGTH, 8
    torch.manual_seed(0)
    return (
        torch.randn(BATCH, GROUPS * QUERIES, *shape, dtype=torch.float64),
        torch.randn(BATCH, GROUPS, *shape, dtype=torch.float64),
        torch.randn(BATCH, GROUPS, *shape, dtype=torch.float64),
    )


@METHODS
def test_attention_drops_nothing_else_and_a_rank_with_some_heads_has_their_masks(attend: Attend) -> None:
    """Next to nothing dropped, it is torch's attention; two ranks' heads are those of one process."""
    q, k, v = queries_keys_values()
    cu_seqlens = torch.tensor([place for start in range(0, BATCH * LENGTH, LENGTH) for place in (start, start + 11)])
    for mask in (None, document_mask(cu_seqlens, BATCH, LENGTH)):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        torch.testing.assert_close(attend(q, k, v, mask, rule_of(1e-12)), wanted, rtol=1e-10, atol=1e-12)
    halves = zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
    shares = [attend(*half, None, rule_of(0.4, rank * GROUPS // 2)) for rank, half in enumerate(halves)]
    whole = attend(q, k, v, None, rule_of(0.4))
    torch.testing.assert_close(torch.cat(shares, 1), whole, rtol=1e-12, atol=1e-14)


@METHODS
def test_probabilities_are_dropped_fairly_and_heads_independently(attend: Attend) -> None:
    """Queries of zeros attend to all keys equally, and values that are unit vectors show the mask."""
    zeros = torch.zeros(BATCH, GROUPS, LENGTH, LENGTH, dtype=torch.float64)
    everything = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    values = torch.eye(LENGTH, dtype=torch.float64).expand_as(zeros)
    shown = attend(zeros.repeat_interleave(QUERIES, 1), zeros, values, everything, rule_of(0.25))
    assert set((shown * LENGTH).round(decimals=9).unique().tolist()) == {0.0, round(1 / 0.75, 9)}
    x = deviations(shown > 0, 0.25).transpose(0, 1).flatten(2)  # heads first
    assert z_score(x) < 5
    for one, other in combinations(x.flatten(0, 1), 2):  # of heads, and of samples
        assert z_score(one * other) < 5


def compiled_frames(**options: bool) -> tuple[int, int]:
    """How often Dynamo compiled something up to the end of the first block, and in three steps of other seeds.

    Results are those of blocks left alone.
    """
    from torch._dynamo.testing import CompileCounter  # takes seconds

    stage, plain, counter = stage_of(BOTH).train(), stage_of(BOTH).train(), CompileCounter()
    torch._dynamo.reset()
    for layer in stage.layers:
        if isinstance(layer, Block):
            layer.compile(backend=counter, **options)
    frames: list[int] = []

    def counted(name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        y = call(x, *args)
        frames.extend([counter.frame_count] * name.startswith("layers."))
        return y

    stage.call_through(counted)
    tokens = random_tokens(2, 16, 60)
    for iteration in range(3):
        seeds = seed_fields(layers_with_dropout(stage.specs), 5, iteration, 0, CPU)
        fields = {"labels": tokens[:, 1:], "seq_length": 16, **seeds}
        assert torch.equal(stage(tokens[:, :-1], fields), plain(tokens[:, :-1], fields))
    return frames[0], frames[-1]


@pytest.mark.slow
def test_a_block_is_compiled_once_for_all_layers_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph on the CPU; a GPU's way leaves it to seed the generator, and is not compiled anew either."""
    assert compiled_frames(fullgraph=True) == (1, 1)
    monkeypatch.setattr("gptpar.model.core_attention.attention_with_dropout", _dropout_in_kernel)
    first, all_blocks = compiled_frames()
    assert first == all_blocks
