"""Attention sinks on a GPU: flash attention's kernels and one more key both compute what a softmax in fp64 says."""

import pytest
import torch

from gptpar.model.core_attention import AttentionRule, core_attention
from tests.gpu.test_documents_gpu import (
    BATCH,
    DEVICE,
    DOCUMENTS,
    GROUPS,
    LENGTH,
    TOLERANCE,
    cu_seqlens_of,
    inputs,
    masked_scores,
)

pytestmark = pytest.mark.gpu


def with_gradients(y: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, y.shape[2], device=DEVICE, dtype=y.dtype)[:, None].expand(y.shape)
    return [y.detach(), *torch.autograd.grad(y, parts, weights)]


def by_definition(parts: list[torch.Tensor], cu_seqlens: torch.Tensor | None, window: int | None) -> list[torch.Tensor]:
    wide = [part.detach().double().requires_grad_() for part in parts]
    q, _, v, sinks_H = wide
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = masked_scores(wide, cu_seqlens, window)
    column = sinks_H[None, :, None, None].expand(BATCH, -1, LENGTH, 1)
    return with_gradients(torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v, wide)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("documents", [None, *DOCUMENTS])
@pytest.mark.parametrize(("queries", "width"), [(8, 64), (1, 128), (2, 20)])
def test_sinks_take_part_in_the_softmax(
    queries: int, width: int, documents: str | None, window: int | None, compiled: bool
) -> None:
    """A width of 20 channels has no kernel of variable length: there the sink is a key."""
    parts = inputs(queries, width)
    sinks_H = torch.linspace(-3, 5, GROUPS * queries, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    parts.append(sinks_H)
    cu_seqlens = None if documents is None else cu_seqlens_of(documents)
    attention = torch.compile(core_attention) if compiled else core_attention
    found = with_gradients(attention(*parts[:3], AttentionRule(cu_seqlens, None, window, 0.2, sinks_H)), parts)
    for got, one in zip(found, by_definition(parts, cu_seqlens, window), strict=True):
        limit = TOLERANCE * max(1.0, one.abs().max().item())
        torch.testing.assert_close(got.double(), one, rtol=TOLERANCE, atol=limit)
