"""Context parallelism on GPUs: what a kernel computes of gathered keys, what is kept, and training on two GPUs."""

import os
import subprocess
import sys
from typing import Any, cast

import pytest
import torch

from gptpar.config.sections import parallel
from gptpar.context_parallel import attend_by_gathering
from gptpar.model.core_attention import AttentionDropout, AttentionRule, core_attention
from tests.gpu.test_documents_gpu import DEVICE, TOLERANCE, seeds
from tests.one_by_one import OneByOne

pytestmark = pytest.mark.gpu

HEADS, GROUPS, LENGTH, WIDTH = 8, 4, 256, 64


def inputs(batch: int, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in shapes]


def documents(batch: int) -> torch.Tensor:
    """Of one token, across the borders of chunks, and as long as a sample."""
    starts = [0, 1, 50, 90, 130, 200, *range(LENGTH, batch * LENGTH, LENGTH)]
    return torch.tensor(starts + [batch * LENGTH] * (17 - len(starts)), dtype=torch.int32, device=DEVICE)


def by_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, whole: list[torch.Tensor], grad: torch.Tensor, rule: AttentionRule
) -> list[torch.Tensor]:
    """Output and gradients of whole samples, and of sinks where there are some, from ranks one after the other."""
    sinks = [] if rule.sinks_H is None else [rule.sinks_H]
    d_sinks = [torch.zeros_like(one, dtype=torch.float64) for one in sinks]
    ranks = OneByOne(size, whole[1].detach(), whole[2].detach())
    ranks.exchange(monkeypatch)
    y, d_q = torch.empty_like(grad), torch.empty_like(grad)
    for split in ranks.splits:
        ranks.rank, places = split.rank, split.places(1, grad.shape[2])[0].to(DEVICE)
        own = [x.detach()[:, :, places].requires_grad_() for x in whole]
        mine = attend_by_gathering(split, cast(Any, ranks), own[0], own[1], own[2], rule)
        y[:, :, places] = mine.detach()
        d_q[:, :, places], *of_sinks = torch.autograd.grad(mine, [own[0], *sinks], grad[:, :, places])
        d_sinks = [total + one for total, one in zip(d_sinks, of_sinks, strict=True)]
    return [y, d_q, *ranks.gradients(), *d_sinks]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("size", "at_once"), [(2, 4), (4, 1), (4, 3)])
def test_gathered_keys_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    at_once: int,
    batch: int,
    window: int | None,
    has_documents: bool,
    has_sinks: bool,
) -> None:
    """The kernel of variable length with more keys than queries, against a mask in fp64 with all of them."""
    monkeypatch.setattr(parallel, "MAX_GATHERED_BYTES", at_once * 2 * batch * LENGTH * WIDTH * 2)
    whole, cu_seqlens = inputs(batch), documents(batch) if has_documents else None
    sinks_H = torch.linspace(-3, 5, HEADS, dtype=whole[0].dtype, device=DEVICE).requires_grad_() if has_sinks else None
    given = whole if sinks_H is None else [*whole, sinks_H]
    wide = [x.detach().double().requires_grad_() for x in given]
    rule = AttentionRule(cu_seqlens, None, window, 0.2, sinks_H)
    wanted = core_attention(wide[0], wide[1], wide[2], rule._replace(sinks_H=wide[3] if has_sinks else None))
    grad = torch.randn_like(whole[0])
    wanted_all = [wanted.detach(), *torch.autograd.grad(wanted, wide, grad.double())]
    found = by_ranks(monkeypatch, size, whole, grad, rule)
    for got, right in zip(found, wanted_all, strict=True):
        relative = TOLERANCE if got.ndim > 1 else 3 * TOLERANCE  # a sink's sum over all tokens nearly cancels
        torch.testing.assert_close(got.double(), right, rtol=relative, atol=relative * right.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_documents", [False, True])
def test_dropped_probabilities_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_documents: bool
) -> None:
    """A mask that differed in a few places would show in outputs of about 1."""
    monkeypatch.setattr(parallel, "MAX_GATHERED_BYTES", 1)
    whole, cu_seqlens = inputs(2, dtype), documents(2) if has_documents else None
    rule = AttentionRule(cu_seqlens, AttentionDropout(0.3, seeds(), 0, GROUPS), None, 0.2)
    wanted = core_attention(whole[0], whole[1], whole[2], rule)
    grad = torch.randn_like(wanted)
    wanted_all = [wanted.detach(), *torch.autograd.grad(wanted, whole, grad)]
    found = by_ranks(monkeypatch, 2, whole, grad, rule)
    for got, right in zip(found, wanted_all, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=TOLERANCE * right.abs().max().item())
    kept = rule._replace(dropout=AttentionDropout(1e-9, seeds(), 0, GROUPS))
    other = core_attention(whole[0], whole[1], whole[2], kept)
    assert (other - wanted).abs().max() > 0.1


def test_no_gathered_keys_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the passes there are a rank's own tokens alone, and within them the keys of one group at a time."""
    size, length = 4, 16384
    whole = inputs(1, length=length)
    ranks = OneByOne(size, whole[1].detach(), whole[2].detach())
    ranks.exchange(monkeypatch)
    monkeypatch.setattr(parallel, "MAX_GATHERED_BYTES", 1)
    places = ranks.splits[0].places(1, length)[0].to(DEVICE)
    q, k, v = (x.detach()[:, :, places].requires_grad_() for x in whole)
    of_group = 2 * length * WIDTH * 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = attend_by_gathering(ranks.splits[0], cast(Any, ranks), q, k, v)
    statistics = HEADS * length // size * 4
    assert torch.cuda.memory_allocated() - before <= 3 * y.nbytes + 2 * statistics + 2**20
    assert torch.cuda.max_memory_allocated() - before <= 4 * y.nbytes + 2 * statistics + 4 * of_group + 2**20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", ["--model documents", "--model llama", "--model gpt --attention-dropout 0.2"])
def test_training_on_two_gpus_is_that_on_one(flags: str) -> None:
    """Both ways over the context axis with ZeRO and recomputation, in bf16; each resumes the one before."""
    words = f"check-layouts --nproc 2 --only cp2 --pairwise --bf16 {flags}".split()
    ran = subprocess.run(
        [sys.executable, "-m", "gptpar", *words], env=dict(os.environ), capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "compute the same as one process" in ran.stdout
