"""Documents and windows on a GPU: flash attention of variable length computes what a mask in fp64 says."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, product

import pytest
import torch

from gptpar.data.loader import MicroBatch, make_micro_batch
from gptpar.model.core_attention import AttentionDropout, AttentionRule, attention_mask, core_attention
from gptpar.model.dropout import LayerSeeds, seed_fields, seeds_field
from tests.gpu.training import run

pytestmark = pytest.mark.gpu

DEVICE, BATCH, GROUPS, LENGTH, ROOM = "cuda", 2, 4, 200, 512
DOCUMENTS = {"some": [1, 130, 69, 70, 1, 129], "single tokens": [1] * 400, "whole samples": [200, 200]}
TOLERANCE = 2e-2
"""Of numbers of about 1, whose bf16 copies differ from them by up to 2^-8."""


def cu_seqlens_of(name: str) -> torch.Tensor:
    starts = [0, *accumulate(DOCUMENTS[name])]
    return torch.tensor(starts + starts[-1:] * (ROOM + 1 - len(starts)), dtype=torch.int32, device=DEVICE)


def inputs(queries: int, width: int, length: int = LENGTH, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Queries, keys and values as the model cuts them out of one projection: views with strides."""
    torch.manual_seed(0)
    shape = (BATCH, length, GROUPS, queries + 2, width)
    qkv = torch.randn(shape, dtype=dtype, device=DEVICE).permute(0, 2, 3, 1, 4)
    views = [qkv[:, :, :queries].flatten(1, 2), qkv[:, :, queries], qkv[:, :, queries + 1]]
    return [view.detach().requires_grad_() for view in views]


def with_gradients(y: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, parts, torch.ones_like(y) / 2)]


def masked_scores(wide: list[torch.Tensor], cu_seqlens: torch.Tensor | None, window: int | None) -> torch.Tensor:
    q, k, *_ = wide
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    mask = attention_mask(BATCH, LENGTH, cu_seqlens, window, q.device)
    return (q @ k.mT * 0.2).masked_fill(~mask, float("-inf"))


def by_mask(parts: list[torch.Tensor], cu_seqlens: torch.Tensor | None, window: int | None) -> list[torch.Tensor]:
    wide = [part.detach().double().requires_grad_() for part in parts]
    v = wide[2].repeat_interleave(wide[0].shape[1] // wide[2].shape[1], dim=1)
    return with_gradients(masked_scores(wide, cu_seqlens, window).softmax(-1) @ v, wide)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("documents", "window"),
    [*product(DOCUMENTS, (None, 37)), *((None, window) for window in (1, 37, LENGTH - 1, LENGTH))],
)
@pytest.mark.parametrize(("queries", "width"), [(1, 64), (2, 128), (2, 20)])
def test_documents_and_windows_are_their_mask(
    queries: int, width: int, documents: str | None, window: int | None, compiled: bool
) -> None:
    """A width of 20 channels has no kernel and takes the mask."""
    parts, cu_seqlens = inputs(queries, width), None if documents is None else cu_seqlens_of(documents)
    attention = torch.compile(core_attention) if compiled else core_attention
    found = with_gradients(attention(parts[0], parts[1], parts[2], AttentionRule(cu_seqlens, None, window, 0.2)), parts)
    for got, wanted in zip(found, by_mask(parts, cu_seqlens, window), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def seeds() -> LayerSeeds:
    return seed_fields(["layers.0"], 1234, 3, 1, torch.device(DEVICE))[seeds_field("layers.0")]


def assert_ranks_have_their_part(
    attend: Callable[[list[torch.Tensor], int], list[torch.Tensor]],
    parts: list[torch.Tensor],
    whole: list[torch.Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """Divide the heads over two and over four ranks: what each computes is its part of ``whole``."""
    for size in (2, 4):
        of_ranks = []
        for rank in range(size):
            share = [part.detach().chunk(size, 1)[rank].requires_grad_() for part in parts]
            of_ranks.append(attend(share, rank * GROUPS // size))
        for found, wanted in zip(zip(*of_ranks, strict=True), whole, strict=True):
            error = tolerance * wanted.abs().max().item()
            torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=error)


@pytest.mark.parametrize("window", [None, 37])
def test_dropout_inside_documents_belongs_to_groups(window: int | None) -> None:
    """Ranks with a part of the groups have their masks; and next to no dropout is none."""
    parts, cu_seqlens = inputs(2, 64), cu_seqlens_of("some")

    def attend(parts: list[torch.Tensor], p: float, first: int = 0) -> list[torch.Tensor]:
        rule = AttentionRule(cu_seqlens, AttentionDropout(p, seeds(), first, GROUPS), window, 0.2)
        return with_gradients(core_attention(parts[0], parts[1], parts[2], rule), parts)

    whole, again = attend(parts, 0.3), attend(parts, 0.3)
    assert torch.equal(whole[0], again[0])
    assert_ranks_have_their_part(lambda share, first: attend(share, 0.3, first), parts, whole)
    for got, wanted in zip(attend(parts, 1e-9), by_mask(parts, cu_seqlens, window), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(whole[0], attend(parts, 1e-9)[0], atol=0.1)


def test_documents_need_no_mask_in_memory() -> None:
    """Of 256 tokens in samples of 16,384; a mask of all pairs would take 512 MiB."""
    parts = inputs(1, 64, 16384)
    cu_seqlens = torch.arange(0, BATCH * 16384 + 1, 256, dtype=torch.int32, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_gradients(core_attention(parts[0], parts[1], parts[2], AttentionRule(cu_seqlens)), parts)
    assert torch.cuda.max_memory_allocated() - before < 256 << 20


def test_a_window_needs_no_mask_in_memory() -> None:
    """Attention to 64 of 16,384 tokens takes megabytes; a mask of all pairs would take 256 MiB."""
    parts = [torch.randn(1, 2, 16384, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_gradients(core_attention(parts[0], parts[1], parts[2], AttentionRule(window=64, scale=0.125)), parts)
    assert torch.cuda.max_memory_allocated() - before < 100 << 20


@pytest.mark.parametrize("flags", ["", "--window-size 5 --window-pattern SF", "--recompute-granularity full"])
def test_training_with_documents_is_that_with_masks(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps with other documents each; Adam with an epsilon of 1 steps by about the gradient."""
    rules = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}

    def micro_batch(tokens_BT: torch.Tensor, room: int = 16) -> MicroBatch:
        return make_micro_batch(torch.where(tokens_BT < 15, 3, tokens_BT).numpy(), eod=3, room=room, **rules)

    flags = f"--bf16 --num-query-groups 2 --adam-eps 1 --lr 0.1 {flags}"
    train = partial(run, DEVICE, flags)
    (losses, kernel), (small_losses, _) = train(micro_batch), train(partial(micro_batch, room=0))
    assert losses == pytest.approx(small_losses, abs=3e-3), "the room changes no number"
    monkeypatch.setattr("gptpar.model.core_attention.has_varlen_kernel", lambda *_: False)
    masked_losses, masked = train(micro_batch)
    _, whole = run(DEVICE, flags)
    assert losses != masked_losses, "both took the same kernel"
    assert (kernel - masked).norm() < 0.1 * (masked - whole).norm()
    assert losses == pytest.approx(masked_losses, abs=3e-3)


@pytest.mark.parametrize("pattern", ["S", "SF"])
def test_training_with_windows_is_that_with_masks(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam with an epsilon of 1 steps by about the gradient, so that rounding is not amplified to whole steps."""
    flags = "--bf16 --num-query-groups 2 --adam-eps 1 --lr 1"
    windows = f"{flags} --window-size 5 --window-pattern {pattern}"
    (full_losses, full), (losses, kernel) = (run(DEVICE, f) for f in (flags, windows))
    monkeypatch.setattr("gptpar.model.core_attention.has_varlen_kernel", lambda *_: False)
    masked_losses, masked = run(DEVICE, windows)
    assert losses != masked_losses, "both took the same kernel"
    assert (kernel - masked).norm() < 0.1 * (masked - full).norm()
    assert max(abs(a - b) for a, b in zip(losses, masked_losses, strict=True)) < 1e-3
    assert max(abs(a - b) for a, b in zip(losses, full_losses, strict=True)) > 2e-3
