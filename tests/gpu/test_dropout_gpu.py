"""Dropout on a GPU: hidden states lose what they lose on the CPU; attention's masks belong to groups of heads."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from gptpar.model.core_attention import AttentionDropout, AttentionRule, attention_with_dropout, document_mask
from gptpar.model.dropout import EMBEDDINGS, kept
from tests.gpu.test_documents_gpu import BATCH, DEVICE, GROUPS, assert_ranks_have_their_part, inputs, seeds
from tests.gpu.training import run

pytestmark = pytest.mark.gpu

LENGTH, WIDTH = 256, 64
BOTH = "--hidden-dropout 0.1 --attention-dropout 0.2"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def dropping(p: float, first: int = 0) -> AttentionRule:
    return AttentionRule(dropout=AttentionDropout(p, seeds(), first, GROUPS))


def attend(parts: list[torch.Tensor], p: float, first: int = 0, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    y = attention_with_dropout(parts[0], parts[1], parts[2], mask, dropping(p, first))
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), parts)]


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_of_hidden_states_are_the_cpus(compiled: bool) -> None:
    rows = torch.arange(1000, dtype=torch.int32) * 2_000_000
    words = seeds().words[EMBEDDINGS]
    found = (torch.compile(kept) if compiled else kept)(words, rows.to(DEVICE), 1000, 0.1)
    assert torch.equal(found.cpu(), kept(words.cpu(), rows, 1000, 0.1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_a_rank_with_some_heads_has_their_masks(dtype: torch.dtype, queries: int, documents: bool) -> None:
    """Half of the groups and a quarter of them: output and gradients are the whole's, and the same each time."""
    cu_seqlens = torch.tensor([0, 100, LENGTH, LENGTH + 100, 2 * LENGTH], device=DEVICE)
    mask = document_mask(cu_seqlens, BATCH, LENGTH) if documents else None
    parts = inputs(queries, WIDTH, LENGTH, dtype)
    whole, again = attend(parts, 0.3, 0, mask), attend(parts, 0.3, 0, mask)
    assert torch.equal(whole[0], again[0])
    assert_ranks_have_their_part(lambda share, first: attend(share, 0.3, first, mask), parts, whole, TOLERANCE[dtype])
    assert not torch.allclose(whole[0], attend(parts, 1e-9, 0, mask)[0], atol=0.1)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_probabilities_are_dropped_fairly_and_heads_independently(dtype: torch.dtype) -> None:
    """The last query of zeros attends to all keys equally; values of one and zero show the mask, 64 keys at a time."""
    zeros = torch.zeros(BATCH, GROUPS, LENGTH, WIDTH, dtype=dtype, device=DEVICE)
    masks = []
    for first in range(0, LENGTH, WIDTH):
        values = zeros.clone()
        values[:, :, range(first, first + WIDTH), range(WIDTH)] = 1
        y = attention_with_dropout(zeros, zeros, values, None, dropping(0.25))
        masks.append(y[:, :, first + WIDTH :] > 0)  # these queries see all of the keys
        share = (1 / (1 - 0.25)) / torch.arange(first + WIDTH + 1, LENGTH + 1, device=DEVICE)
        wanted = masks[-1] * share[:, None]
        torch.testing.assert_close(y[:, :, first + WIDTH :].double(), wanted.double(), rtol=1e-2, atol=1e-6)
    shown = torch.cat([mask.transpose(0, 1).flatten(2) for mask in masks], dim=-1).flatten(0, 1)
    x = (shown.double() - 0.75) / (0.25 * 0.75) ** 0.5
    assert abs(x.mean().item()) * x.numel() ** 0.5 < 5
    for one, other in combinations(x, 2):
        assert abs((one * other).mean().item()) * one.numel() ** 0.5 < 5


def test_attention_leaves_the_generator_as_it_was() -> None:
    parts = inputs(1, WIDTH, LENGTH)
    torch.manual_seed(0)
    before = torch.rand(3, device=DEVICE)
    torch.manual_seed(0)
    attend(parts, 0.3)
    assert torch.equal(torch.rand(3, device=DEVICE), before)


def test_hidden_dropout_follows_the_cpu() -> None:
    """Eight steps in fp32, compiled: the masks are the same."""
    gpu, cpu = run(DEVICE, "--hidden-dropout 0.2"), run("cpu", "--hidden-dropout 0.2")
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-4)


@pytest.mark.parametrize("flags", ["--recompute-granularity full", "--recompute-granularity selective", "--no-compile"])
def test_recomputing_and_compiling_keep_the_masks(flags: str) -> None:
    plain, other = run(DEVICE, BOTH), run(DEVICE, f"{BOTH} {flags}")
    assert other[0] == pytest.approx(plain[0], rel=1e-4)


def test_attention_that_drops_next_to_nothing_is_torchs() -> None:
    parts = inputs(1, WIDTH, LENGTH, torch.float32)
    y = attention_with_dropout(parts[0], parts[1], parts[2], None, dropping(1e-9))
    torch.testing.assert_close(y, F.scaled_dot_product_attention(*parts, is_causal=True), rtol=1e-4, atol=1e-5)
