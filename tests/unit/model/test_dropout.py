"""Dropout's masks: fair, independent of each other, and functions of what they may depend on alone."""

from itertools import combinations

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
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.system.hashes import seed_of
from gptpar.tensor_parallel import TensorAxis
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, random_tokens, tiny_config

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


def element_is_kept(low: int, high: int, row: int, column: int, threshold: int) -> bool:
    """The hash in Python's integers, modulo 2^32."""

    def step(x: int, bits: int, factor: int) -> int:
        return ((x ^ (x >> bits)) * factor) & 0xFFFFFFFF

    def mixed(x: int) -> int:
        x = step(step(x, 16, 0x7FEB352D), 15, 0x846CA68B)
        return x ^ (x >> 16)

    key = mixed((mixed(row ^ low) + high) & 0xFFFFFFFF)
    other_key = mixed(mixed((row + high) & 0xFFFFFFFF) ^ low)
    x = (step(column ^ key, 16, 0x7FEB352D) + other_key) & 0xFFFFFFFF
    return step(x, 15, 0x846CA68B) ^ 0x80000000 >= threshold  # compared as a signed number


def test_masks_are_stable() -> None:
    """A change here would silently change every run with dropout."""
    words = torch.tensor([[1, 2], [-5, 2**31 - 1]], dtype=torch.int32)
    rows = torch.tensor([0, 7, 2**31 - 1], dtype=torch.int32)
    for low, high in words.tolist():
        found = kept(torch.tensor([low, high], dtype=torch.int32), rows, 300, 0.3)
        threshold, seed = round(0.3 * 2**32), (low & 0xFFFFFFFF, high & 0xFFFFFFFF)
        assert found.tolist() == [
            [element_is_kept(*seed, row, column, threshold) for column in range(300)] for row in rows.tolist()
        ]
    assert kept(words[0], rows, 100, 1e-12).all() and not kept(words[0], rows, 100, 1 - 1e-12).any()
    assert seeds_of().host[PROBABILITIES] == seed_of(1234, "dropout", 0, 0, "layers.0", "attention probabilities")
    assert seeds_of().words.flatten().view(torch.int64).tolist() == seeds_of().host.tolist()


def test_a_rank_with_some_tokens_has_their_rows_of_the_mask() -> None:
    x = torch.randn(12, 8)
    whole = HiddenDropout(0.5, MLP_OUTPUT)(x, seeds_of())
    shares = [
        HiddenDropout(0.5, MLP_OUTPUT, TensorAxis(3, rank, sequence_parallel=True))(
            x[4 * rank : 4 * rank + 4], seeds_of()
        )
        for rank in range(3)
    ]
    assert torch.equal(torch.cat(shares), whole)
    assert torch.equal(HiddenDropout(0.5, MLP_OUTPUT, TensorAxis(3, 2))(x, seeds_of()), whole)


def attended(
    method: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    p: float,
    first: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """One of the two ways, on the CPU."""
    attend = _dropout_in_memory if method == "plain" else _dropout_in_kernel
    return attend(q, k, v, mask, AttentionRule(dropout=AttentionDropout(p, seeds_of(), first, GROUPS)))


def queries_keys_values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = LENGTH, 8
    torch.manual_seed(0)
    return (
        torch.randn(BATCH, GROUPS * QUERIES, *shape, dtype=torch.float64),
        torch.randn(BATCH, GROUPS, *shape, dtype=torch.float64),
        torch.randn(BATCH, GROUPS, *shape, dtype=torch.float64),
    )


METHODS = pytest.mark.parametrize("method", ["plain", "one call a group"])


@METHODS
@pytest.mark.parametrize("documents", [False, True])
def test_attention_that_drops_next_to_nothing_is_torchs(method: str, documents: bool) -> None:
    q, k, v = queries_keys_values()
    cu_seqlens = torch.tensor([place for start in range(0, BATCH * LENGTH, LENGTH) for place in (start, start + 11)])
    mask = document_mask(cu_seqlens, BATCH, LENGTH) if documents else None
    got = attended(method, q, k, v, 1e-12, 0, mask)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@METHODS
@pytest.mark.parametrize("size", [2])
def test_a_rank_with_some_heads_has_their_masks(method: str, size: int) -> None:
    q, k, v = queries_keys_values()
    whole, here = attended(method, q, k, v, 0.4, 0), GROUPS // size
    shares = [
        attended(method, q.chunk(size, 1)[rank], k.chunk(size, 1)[rank], v.chunk(size, 1)[rank], 0.4, rank * here)
        for rank in range(size)
    ]
    torch.testing.assert_close(torch.cat(shares, 1), whole, rtol=1e-12, atol=1e-14)


@METHODS
def test_probabilities_are_dropped_fairly_and_heads_independently(method: str) -> None:
    """Queries of zeros attend to all keys equally, and values that are unit vectors show the mask."""
    zeros = torch.zeros(BATCH, GROUPS, LENGTH, LENGTH, dtype=torch.float64)
    everything = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    values = torch.eye(LENGTH, dtype=torch.float64).expand_as(zeros)
    shown = attended(method, zeros.repeat_interleave(QUERIES, 1), zeros, values, 0.25, 0, everything)
    assert set((shown * LENGTH).round(decimals=9).unique().tolist()) == {0.0, round(1 / 0.75, 9)}
    x = deviations(shown > 0, 0.25).transpose(0, 1).flatten(2)  # heads first
    assert z_score(x) < 5
    for one, other in combinations(x.flatten(0, 1), 2):  # of heads, and of samples
        assert z_score(one * other) < 5


def stage_of(flags: str) -> Stage:
    stage = Stage(gpt_model(tiny_config(flags).model).specs)
    weights = {n: torch.empty(p.shape, dtype=torch.float64) for n, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), seed=3)
    stage.place(weights)
    return stage.train()


def compiled_frames(num_layers: int, **options: bool) -> int:
    """How often Dynamo compiled something in three steps of other seeds; results are those of blocks left alone."""
    from torch._dynamo.testing import CompileCounter  # takes seconds

    flags = f"{BOTH} --num-layers {num_layers}"
    stage, plain, counter = stage_of(flags), stage_of(flags), CompileCounter()
    torch._dynamo.reset()
    for layer in stage.layers:
        if isinstance(layer, Block):
            layer.compile(backend=counter, **options)
    tokens = random_tokens(2, 16, 60)
    for iteration in range(3):
        seeds = seed_fields(layers_with_dropout(stage.specs), 5, iteration, 0, CPU)
        fields = {"labels": tokens[:, 1:], "seq_length": 16, **seeds}
        assert torch.equal(stage(tokens[:, :-1], fields), plain(tokens[:, :-1], fields))
    return counter.frame_count


@pytest.mark.slow
def test_a_block_is_compiled_once_for_all_layers_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph on the CPU; a GPU's way leaves it to seed the generator, and is not compiled anew either."""
    assert compiled_frames(2, fullgraph=True) == 1
    monkeypatch.setattr("gptpar.model.core_attention.attention_with_dropout", _dropout_in_kernel)
    assert compiled_frames(3) == compiled_frames(2)
