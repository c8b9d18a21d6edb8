"""Windows on a GPU: the kernel without a mask computes what the mask in fp64 says."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from gptpar.model.core_attention import AttentionRule, core_attention, seen_SS
from tests.gpu.training import run

pytestmark = pytest.mark.gpu

BATCH, GROUPS, LENGTH = 2, 4, 200
TOLERANCE = 2e-2
"""Of numbers of about 1, whose bf16 copies differ from them by up to 2^-8."""


def attend(
    parts: list[torch.Tensor], window: int, scale: float, attention: Callable[..., torch.Tensor] = core_attention
) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    y = attention(parts[0], parts[1], parts[2], AttentionRule(window=window, scale=scale))
    return [y.detach(), *torch.autograd.grad(y, parts, torch.ones_like(y) / 2)]


def by_mask(parts: list[torch.Tensor], window: int, scale: float) -> list[torch.Tensor]:
    """The same in fp64, by products and a mask."""
    wide = [part.detach().double().requires_grad_() for part in parts]
    q, k, v = wide
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen_SS(LENGTH, window, q.device), float("-inf"))
    y = F.softmax(scores, -1) @ v
    return [y.detach(), *torch.autograd.grad(y, wide, torch.ones_like(y) / 2)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [1, 37, LENGTH - 1, LENGTH])
@pytest.mark.parametrize(("queries", "width"), [(1, 64), (2, 128), (2, 20)])
def test_a_window_is_its_masks(queries: int, width: int, window: int, compiled: bool) -> None:
    """Queries, keys and values are views of one projection; a width of 20 channels has no kernel and takes the mask."""
    torch.manual_seed(0)
    shape = (BATCH, LENGTH, GROUPS, queries + 2, width)
    qkv = torch.randn(shape, dtype=torch.bfloat16, device="cuda").permute(0, 2, 3, 1, 4)
    views = [qkv[:, :, :queries].flatten(1, 2), qkv[:, :, queries], qkv[:, :, queries + 1]]
    parts = [view.detach().requires_grad_() for view in views]
    found = attend(parts, window, 0.2, torch.compile(core_attention) if compiled else core_attention)
    for got, wanted in zip(found, by_mask(parts, window, 0.2), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_window_needs_no_mask_in_memory() -> None:
    """Attention to 64 of 16,384 tokens takes megabytes; a mask of all pairs would take 256 MiB."""
    parts = [torch.randn(1, 2, 16384, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(parts, 64, 0.125)
    assert torch.cuda.max_memory_allocated() - before < 100 << 20


@pytest.mark.parametrize("pattern", ["S", "SF"])
def test_training_with_windows_is_that_with_masks(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam with an epsilon of 1 steps by about the gradient, so that rounding is not amplified to whole steps."""
    flags = "--bf16 --num-query-groups 2 --adam-eps 1 --lr 1"
    windows = f"{flags} --window-size 5 --window-pattern {pattern}"
    (full_losses, full), (losses, kernel) = (run("cuda", f) for f in (flags, windows))
    monkeypatch.setattr("gptpar.model.core_attention.has_varlen_kernel", lambda *_: False)
    masked_losses, masked = run("cuda", windows)
    assert losses != masked_losses, "both took the same kernel"
    assert (kernel - masked).norm() < 0.1 * (masked - full).norm()
    assert max(abs(a - b) for a, b in zip(losses, masked_losses, strict=True)) < 1e-3
    assert max(abs(a - b) for a, b in zip(losses, full_losses, strict=True)) > 2e-3
