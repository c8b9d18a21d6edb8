"""Measures the machine for ``gptpar fit``: GPUs or the CPU's number formats, speed, and free memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from gptpar.model.flops import peak_flops
from gptpar.system.host import available_memory

GPU_SHARE_OF_PEAK = 0.35
"""Assumed fraction of a GPU's peak that training reaches; only the number of steps depends on it."""


@dataclass(frozen=True)
class Machine:
    """The facts on which the choice depends.

    Attributes:
        memory: bytes free for a process: on the GPU, or in the host.
        flops: expected training speed of all GPUs together in FLOP/s; 0 on a CPU, whose speed training itself measures.
    """

    num_gpus: int
    precision: str
    memory: int
    flops: float
    description: str


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of a 350M model's MLP on the CPU, the best of a few tries."""
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b.t())
        best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 1024 * 4096 / best


def this_machine() -> Machine:
    """Examine the GPUs, or compare the CPU's number formats by matrix products."""
    count = torch.cuda.device_count()
    if count:
        properties = torch.cuda.get_device_properties(0)
        precision = "bf16" if properties.major >= 8 else "fp16"
        peak = peak_flops(properties.name, precision) or 100e12
        text = f"{count} x {properties.name}"
        return Machine(count, precision, properties.total_memory, GPU_SHARE_OF_PEAK * peak * count, text)
    fp32, bf16 = matmul_rate(torch.float32), matmul_rate(torch.bfloat16)
    precision = "bf16" if bf16 > 1.3 * fp32 else "fp32"
    text = f"no GPU; matrix products reach {bf16 / 1e9:.0f} GFLOP/s in bf16 and {fp32 / 1e9:.0f} in fp32"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(0, precision, max(free, available_memory()), 0.0, text)
