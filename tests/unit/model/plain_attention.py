"""Attention by definition, and in place of a GPU's kernels what they compute, document by document."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from gptpar.model import attention_sinks
from gptpar.model import varlen_attention as varlen

BATCH, LENGTH, WIDTH = 2, 24, 8


def cu_seqlens_of(lengths: list[int], room: int = 0) -> torch.Tensor:
    """Where documents start, and the end until there is room for so many."""
    starts = [0, *accumulate(lengths)]
    return torch.tensor(starts + starts[-1:] * (room + 1 - len(starts)), dtype=torch.int32)


def inputs(groups: int) -> list[torch.Tensor]:
    """Queries of four heads, keys and values: views of one projection, as the model has them."""
    generator = torch.Generator().manual_seed(groups)
    qkv = torch.randn(BATCH, LENGTH, 4 + 2 * groups, WIDTH, dtype=torch.float64, generator=generator).transpose(1, 2)
    return [part.detach().requires_grad_() for part in qkv.split([4, groups, groups], dim=1)]


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window: int | None,
    scale: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """A token sees those before it in its document, the last ``window`` of them; a sink is one more logit."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(BATCH, 1, LENGTH)
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    seen = (documents[..., None] == documents[..., None, :]) & (distance >= 0) & (distance < (window or LENGTH))
    scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    if sinks_H is None:
        return scores.softmax(-1) @ v
    column = sinks_H[None, :, None, None].expand(BATCH, -1, LENGTH, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions below take the places of torch's kernels on a GPU."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn, raising=False)
    monkeypatch.setattr(varlen, "_GROUPS", {}, raising=False)
    monkeypatch.setattr(attention_sinks, "_flash", flash)
    monkeypatch.setattr(attention_sinks, "_flash_backward", flash_backward)


def varlen_attn(*where: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    assert window_size[1] == 0
    return flash(*where, window_size[0], scale)[0]


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
    assert cu_q.dtype == cu_k.dtype == torch.int32 and left >= -1
    assert divmod(len(q), max_q) == divmod(len(k), max_k) == (len(q) // max_q, 0)  # the lengths of samples
    y, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for queries, keys in _documents(cu_q, cu_k):
        scores = _scores(q[queries], k[keys], left, scale)
        y[queries] = (scores.softmax(-1) @ _of_heads(v[keys], q.shape[1])).transpose(0, 1)
        lse[:, queries] = scores.logsumexp(-1)
    return y, lse


def flash_backward(
    tensors: tuple[torch.Tensor, ...], max_q: int, max_k: int, left: int, scale: float
) -> tuple[torch.Tensor, ...]:
    """The kernel's arithmetic (Dao 2023): probabilities from lse, and row sums from the output that it is given."""
    grad, q, k, v, y, lse, cu_q, cu_k = tensors
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    heads = q.shape[1]
    sums_HN = (grad * y).sum(-1).t()
    for queries, keys in _documents(cu_q, cu_k):
        p = (_scores(q[queries], k[keys], left, scale) - lse[:, queries, None]).exp()
        own = grad[queries].transpose(0, 1)
        d_scores = p * (own @ _of_heads(v[keys], heads).mT - sums_HN[:, queries, None]) * scale
        d_q[queries] = (d_scores @ _of_heads(k[keys], heads)).transpose(0, 1)
        of_heads = (x.transpose(0, 1) for x in (d_scores.mT @ q[queries].transpose(0, 1), p.mT @ own))
        d_k[keys], d_v[keys] = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_heads)
    return d_q, d_k, d_v


def _documents(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Of each document: its queries, which are its last tokens, and its keys."""
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert 0 <= end - start <= last - first
        if end > start:
            yield slice(start, end), slice(first, last)


def _scores(q: torch.Tensor, k: torch.Tensor, left: int, scale: float) -> torch.Tensor:
    """Of each head; -inf where a query does not see a key."""
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    return (q.transpose(0, 1) @ _of_heads(k, q.shape[1]).mT * scale).masked_fill(~seen, -torch.inf)


def _of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values of each query head."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)
