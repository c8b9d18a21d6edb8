"""Attention sinks: each way of computing them equals a softmax over scores and one more logit, which has no value."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from gptpar.model import attention_sinks as sinks_module
from gptpar.model import core_attention as core
from gptpar.model.core_attention import AttentionDropout, AttentionRule, core_attention, document_mask
from gptpar.model.dropout import LayerSeeds
from tests.pairs import every_pair
from tests.unit.model.test_document_attention import cu_seqlens_of, inputs, same, with_gradients

BATCH, LENGTH = 2, 24
SINKS_H = [0.7, -2.0, 4.0, -40.0]
DOCUMENTS = [None, [24, 24], [5, 1, 18, 7, 17]]


def sinks() -> torch.Tensor:
    return torch.tensor(SINKS_H, dtype=torch.float64, requires_grad=True)


def by_definition(
    parts: list[torch.Tensor], sinks_H: torch.Tensor, lengths: list[int] | None, window: int | None, scale: float
) -> list[torch.Tensor]:
    q, k, v = parts
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    seen = document_mask(cu_seqlens_of(lengths or [LENGTH] * BATCH, 0), BATCH, LENGTH, window)
    scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    column = sinks_H[None, :, None, None].expand(BATCH, -1, LENGTH, 1)
    y = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return with_gradients(y, [*parts, sinks_H])


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    left: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's kernel on a GPU is given, and the outputs and logsumexps that it computes."""
    assert cu_q.dtype == torch.int32 and max_q == max_k == LENGTH and left >= -1
    y, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for (start, end), seen, (one, value) in _documents(q, k, v, cu_q, cu_k, left, scale):
        y[start:end] = (one.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1)
        lse[:, start:end] = one.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return y, lse


def _documents(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, left: int, scale: float) -> Any:
    """Of each document: its queries' range, what they see, (scores, values of each head)."""
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys, values = (x[first:last].transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (k, v))
        distance = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        yield (start, end), seen, (q[start:end].transpose(0, 1) @ keys.mT * scale, values)


def flash_backward(
    tensors: tuple[torch.Tensor, ...], max_q: int, max_k: int, left: int, scale: float
) -> tuple[torch.Tensor, ...]:
    """The kernel's arithmetic (Dao 2023): probabilities from lse, and row sums from the output that it is given."""
    grad, q, k, v, y, lse, cu_q, cu_k = tensors
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    queries = q.shape[1] // k.shape[1]
    sums_HN = (grad * y).sum(-1).t()
    for (start, end), seen, (scores, values) in _documents(q, k, v, cu_q, cu_k, left, scale):
        p = (scores - lse[:, start:end, None]).exp() * seen
        own = grad[start:end].transpose(0, 1)
        d_scores = p * (own @ values.mT - sums_HN[:, start:end, None]) * scale
        keys = k[start:end].transpose(0, 1).repeat_interleave(queries, 0)
        d_q[start:end] = (d_scores @ keys).transpose(0, 1)
        of_heads = (x.transpose(0, 1) for x in (d_scores.mT @ q[start:end].transpose(0, 1), p.mT @ own))
        d_k[start:end], d_v[start:end] = (x.unflatten(1, (-1, queries)).sum(2) for x in of_heads)
    return d_q, d_k, d_v


@every_pair(lengths=DOCUMENTS, window=[None, 1, 4], groups=[4, 2, 1], has_kernel=[False, True])
def test_sinks_take_part_in_the_softmax(
    lengths: list[int] | None, window: int | None, groups: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, and the gradients of queries, keys, values and sinks, by masks and as a GPU's kernel computes them."""
    if has_kernel:
        monkeypatch.setattr(core, "has_varlen_kernel", lambda *_: True)
        monkeypatch.setattr(sinks_module, "_flash", flash)
        monkeypatch.setattr(sinks_module, "_flash_backward", flash_backward)
    parts, sinks_H = inputs(groups), sinks()
    cu_seqlens = None if lengths is None else cu_seqlens_of(lengths, 0)
    y = core_attention(*parts, AttentionRule(cu_seqlens, None, window, 0.3, sinks_H))
    same(with_gradients(y, [*parts, sinks_H]), by_definition(parts, sinks_H, lengths, window, 0.3))


def test_a_sink_keeps_its_bits_in_bf16() -> None:
    """A head whose keys are zero: each of n tokens has the probability 1 / (n + exp(sink)). Rounded once, 5.3 / 0.3
    would be wrong by 1.2 %."""
    sinks_H = torch.tensor([1.7, 5.3], dtype=torch.bfloat16)
    q, k, v = torch.randn(1, 2, 8, 8).bfloat16(), torch.zeros(1, 2, 8, 8).bfloat16(), torch.ones(1, 2, 8, 8).bfloat16()
    y = core_attention(q, k, v, AttentionRule(scale=0.3, sinks_H=sinks_H))[0, :, :, 0].double()
    n = torch.arange(1, 9, dtype=torch.float64)
    torch.testing.assert_close(y, n / (n + sinks_H.double().exp()[:, None]), rtol=2**-7, atol=0)


def test_sinks_are_not_dropped_beside_dropout() -> None:
    q, k, v = inputs(groups=2)
    seeds = LayerSeeds(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32))
    dropout = AttentionDropout(0.5, seeds, first_group=0, num_groups=2)
    with pytest.raises(AssertionError, match="sinks cannot be combined with dropout"):
        core_attention(q, k, v, AttentionRule(dropout=dropout, sinks_H=sinks()))
