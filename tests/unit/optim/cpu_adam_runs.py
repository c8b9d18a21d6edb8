"""Vectors to update, and ways to update them on the CPU."""

import torch

from gptpar.optim.cpu_adam import AdamStep, CpuAdam
from tests.unit.optim import update_cases

HOW = AdamStep(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, bias_correction=1.0, step=1)
GRADS = (torch.float32, torch.bfloat16, torch.float16)


def with_isa(isa: int, threads: int = 1) -> CpuAdam:
    adam = CpuAdam(threads)
    adam._isa = isa
    return adam


def make(n: int, grad: torch.dtype = torch.float32, state: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """p, m, v and gradient"""
    random = torch.Generator().manual_seed(n)
    p, m, v, g = (torch.randn(n, generator=random, dtype=torch.float64) for _ in range(4))
    return [p.to(state), (0.1 * m).to(state), (0.01 * v * v).to(state), g.to(grad)]


def same(ours, theirs) -> bool:
    """Bit for bit, any NaN being like any other."""
    return all(update_cases.same(a, b) for a, b in zip(ours, theirs, strict=True))


def run(adam, tensors, how=HOW, *, apart=False, low=None):
    """One step on copies: finite?, then the new p, m, v and low."""
    p, m, v, grad = (t.clone() for t in tensors)
    into = (torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)) if apart else None
    narrow = torch.empty(len(p), dtype=low) if low else None
    finite = adam.step(p, m, v, grad, how, into=into, low=narrow)
    if apart:
        assert same((p, m, v), tensors[:3])
    assert same([grad], tensors[3:])
    return finite, [*(into or (p, m, v)), *([narrow] if low else [])]
