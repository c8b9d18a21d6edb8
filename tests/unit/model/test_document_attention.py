"""Attention inside documents: every way of computing it equals a softmax over what a mask leaves."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from gptpar.data.documents import cumulative_lengths, follow_ends
from gptpar.data.loader import MicroBatch, make_micro_batch
from gptpar.model import core_attention as core
from gptpar.model import varlen_attention as varlen
from gptpar.model.core_attention import AttentionDropout, AttentionRule, _dropout_in_kernel, core_attention
from gptpar.model.dropout import seed_fields, seeds_field
from tests.gpu.training import run
from tests.pairs import in_turns

BATCH, LENGTH, WIDTH = 2, 24, 8
DOCUMENTS = {
    "one a sample": [24, 24],
    "some": [5, 1, 18, 7, 17],
    "single tokens": [1] * 48,
    "single tokens beside a whole sample": [*[1] * 24, 24],
}
CASES = [
    pytest.param(lengths, room, id=f"{name}, room for {room}")
    for name, lengths in DOCUMENTS.items()
    for room in (0, 64)
]


def cu_seqlens_of(lengths: list[int], room: int) -> torch.Tensor:
    """Where documents start, and the end until there is room for so many."""
    starts = [0, *accumulate(lengths)]
    return torch.tensor(starts + starts[-1:] * (room + 1 - len(starts)), dtype=torch.int32)


def inputs(groups: int) -> list[torch.Tensor]:
    """Queries of four heads, keys and values: views of one projection, as the model has them."""
    generator = torch.Generator().manual_seed(groups)
    qkv = torch.randn(BATCH, LENGTH, 4 + 2 * groups, WIDTH, dtype=torch.float64, generator=generator).transpose(1, 2)
    return [part.detach().requires_grad_() for part in qkv.split([4, groups, groups], dim=1)]


def with_gradients(y: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, parts, weights)]


def by_definition(
    parts: list[torch.Tensor], lengths: list[int], window: int | None, scale: float
) -> list[torch.Tensor]:
    """A token sees those before it in its document, the last ``window`` of them."""
    q, k, v = parts
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(BATCH, 1, LENGTH)
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    seen = (documents[..., None] == documents[..., None, :]) & (distance >= 0) & (distance < (window or LENGTH))
    y = (q @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v
    return with_gradients(y, parts)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@in_turns(documents=[case.values for case in CASES], heads=[(None, 4), (1, 2), (4, 1), (LENGTH, 2), (4, 4), (None, 1)])
def test_documents_are_apart(documents: tuple[list[int], int], heads: tuple[int | None, int]) -> None:
    (lengths, room), (window, groups) = documents, heads
    parts = inputs(groups)
    y = core_attention(*parts, AttentionRule(cu_seqlens_of(lengths, room), None, window, 0.3))
    same(with_gradients(y, parts), by_definition(parts, lengths, window, 0.3))


@pytest.mark.parametrize(("lengths", "room", "window"), [(DOCUMENTS["some"], 0, None), (DOCUMENTS["some"], 64, 4)])
def test_dropout_that_drops_next_to_nothing_keeps_documents_apart(
    lengths: list[int], room: int, window: int | None
) -> None:
    parts, name = inputs(2), seeds_field("layers.0")
    dropout = AttentionDropout(1e-12, seed_fields(["layers.0"], 1, 0, 0, torch.device("cpu"))[name], 0, 2)
    y = core_attention(*parts, AttentionRule(cu_seqlens_of(lengths, room), dropout, window, 0.3))
    same(with_gradients(y, parts), by_definition(parts, lengths, window, 0.3))


def varlen_attn(
    q_NHK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NGK: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What torch's kernel on a GPU is given and computes."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == LENGTH and window_size[1] == 0
    found = []
    for start, end in pairwise(cu_q.tolist()):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_NHK, k_NGK, v_NGK))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window_size[0] >= 0:
            seen = seen.triu(-window_size[0])
        found.append(((q @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


@in_turns(
    documents=[case.values for case in CASES], heads=[(None, 4), (4, 2), (LENGTH, 4), (None, 2), (4, 4), (LENGTH, 2)]
)
def test_a_gpus_kernel_is_given_documents_and_windows(
    documents: tuple[list[int], int], heads: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lengths, room), (window, groups) = documents, heads
    monkeypatch.setattr(core, "has_varlen_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn, raising=False)
    monkeypatch.setattr(varlen, "_GROUPS", {}, raising=False)
    parts = inputs(groups)
    y = core_attention(*parts, AttentionRule(cu_seqlens_of(lengths, room), None, window, 0.3))
    same(with_gradients(y, parts), by_definition(parts, lengths, window, 0.3))


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


@pytest.mark.slow
def test_joined_padding_changes_no_number_of_a_training() -> None:
    """Losses and weights, against a document for each token of padding."""
    rules = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}

    def joined(tokens_BT: torch.Tensor) -> MicroBatch:
        tokens_BT = torch.where(tokens_BT < 12, 3, tokens_BT)
        tokens_BT[:, -6:] = 3
        return make_micro_batch(tokens_BT.numpy(), eod=3, **rules)

    def apart(tokens_BT: torch.Tensor) -> MicroBatch:
        batch = joined(tokens_BT)
        cu_seqlens = cumulative_lengths(follow_ends((batch.tokens_BS == 3).numpy()))
        assert cu_seqlens is not None and batch.cu_seqlens is not None
        assert len(set(cu_seqlens.tolist())) > len(set(batch.cu_seqlens.tolist()))
        return replace(batch, cu_seqlens=torch.from_numpy(cu_seqlens))

    (losses, weights), (wanted_losses, wanted) = (
        run("cpu", "--fp64 --position-embedding-type rope --window-size 4", make) for make in (joined, apart)
    )
    assert losses == pytest.approx(wanted_losses, rel=1e-12)
    torch.testing.assert_close(weights, wanted, rtol=1e-10, atol=1e-12)
