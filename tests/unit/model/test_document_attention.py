"""Attention inside documents: every way of computing it equals a softmax over what a mask leaves."""

from typing import Any

import pytest
import torch

from gptpar.model import core_attention as core
from gptpar.model.core_attention import AttentionDropout, AttentionRule, _dropout_in_kernel, core_attention
from gptpar.model.dropout import LayerSeeds, seed_fields, seeds_field
from tests.pairs import every_pair
from tests.unit.model.plain_attention import BATCH, LENGTH, by_definition, cu_seqlens_of, inputs, use_plain_kernels

DOCUMENTS: dict[str, list[int] | None] = {
    "none": None,
    "one a sample": [24, 24],
    "some": [5, 1, 18, 7, 17],
    "single tokens": [1] * 48,
    "single tokens beside a whole sample": [*[1] * 24, 24],
}
WAYS = ["masks", "masks, sinks", "kernel", "kernel, sinks", "next to nothing dropped"]


def sinks() -> torch.Tensor:
    return torch.tensor([0.7, -2.0, 4.0, -40.0], dtype=torch.float64, requires_grad=True)


@every_pair(
    name=list(DOCUMENTS), room=[0, 64], heads=[(None, 4), (1, 2), (4, 1), (LENGTH, 2), (4, 4), (None, 1)], way=WAYS
)
def test_documents_are_apart(
    name: str, room: int, heads: tuple[int | None, int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and all gradients, by masks, as a GPU's kernel computes them, with sinks, and in dropout's own way."""
    lengths, (window, groups) = DOCUMENTS[name], heads
    if way.startswith("kernel"):
        monkeypatch.setattr(core, "has_varlen_kernel", lambda *_: True)
        use_plain_kernels(monkeypatch)
    seeds = seed_fields(["layers.0"], 1, 0, 0, torch.device("cpu"))[seeds_field("layers.0")]
    rule = AttentionRule(
        cu_seqlens=None if lengths is None else cu_seqlens_of(lengths, room),
        dropout=AttentionDropout(1e-12, seeds, 0, groups) if way == WAYS[-1] else None,
        window=window,
        scale=0.3,
        sinks_H=sinks() if "sinks" in way else None,
    )
    parts = inputs(groups)
    leaves = parts if rule.sinks_H is None else [*parts, rule.sinks_H]
    found = core_attention(*parts, rule)
    wanted = by_definition(*parts, lengths or [LENGTH] * BATCH, window, 0.3, rule.sinks_H)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    for got, expected in zip(*(torch.autograd.grad(y, leaves, weights) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("cu_seqlens", "window"), [(None, 4), (cu_seqlens_of([5, 43], 8), None)])
def test_a_gpus_kernel_drops_with_the_seeds_of_groups(
    cu_seqlens: torch.Tensor | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is a call under its own seed, on documents and windows without a mask."""
    calls = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: Any) -> torch.Tensor:
        calls.append((how, torch.initial_seed()))
        return q + k.repeat_interleave(2, 1)

    monkeypatch.setattr("gptpar.model.core_attention.varlen_attention", kernel)
    q, k, v = inputs(2)
    seeds = seed_fields(["layers.0"], 1, 0, 0, torch.device("cpu"))[seeds_field("layers.0")]
    rule = AttentionRule(cu_seqlens, AttentionDropout(0.4, seeds, 0, 2), window, 0.3)
    y = _dropout_in_kernel(q, k, v, None, rule)
    assert torch.equal(y, q + k.repeat_interleave(2, 1))
    assert [how for how, _ in calls] == [(cu_seqlens, window, 0.3, 0.4)] * 2
    assert calls[0][1] != calls[1][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sink_keeps_its_bits_and_its_gradient(dtype: torch.dtype) -> None:
    """A head whose keys are zero: each of n tokens has the probability 1 / (n + exp(sink)). Rounded once, 5.3 / 0.3
    would be wrong by 1.2 %."""
    sinks_H = torch.tensor([1.7, 5.3], dtype=dtype, requires_grad=True)
    q, k, v = torch.randn(1, 2, 8, 8).to(dtype), torch.zeros(1, 2, 8, 8).to(dtype), torch.ones(1, 2, 8, 8).to(dtype)
    y = core_attention(q, k, v, AttentionRule(scale=0.3, sinks_H=sinks_H))[0, :, :, 0].double()
    n, size = torch.arange(1, 9, dtype=torch.float64), sinks_H.double().exp().detach()[:, None]
    torch.testing.assert_close(y, n / (n + size), rtol=2**-7, atol=0)
    (grad,) = torch.autograd.grad(y.sum(), sinks_H)
    torch.testing.assert_close(grad.double(), -(n * size / (n + size) ** 2).sum(1), rtol=2**-6, atol=0)


def test_sinks_are_not_dropped_beside_dropout() -> None:
    q, k, v = inputs(groups=2)
    seeds = LayerSeeds(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32))
    dropout = AttentionDropout(0.5, seeds, first_group=0, num_groups=2)
    with pytest.raises(AssertionError, match="sinks cannot be combined with dropout"):
        core_attention(q, k, v, AttentionRule(dropout=dropout, sinks_H=sinks()))
