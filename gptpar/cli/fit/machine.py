"""Measures the machine for ``gptpar fit``: GPUs or the CPU's number formats, speed, and free memory."""

from __future__ import annotations

import contextlib
import io
import os
import time
from dataclasses import dataclass

import torch

from gptpar.cli.benchmark.measure import parse
from gptpar.config.validate import resolve
from gptpar.model.gpt import gpt_model
from gptpar.plan.hardware import peak_flops
from gptpar.run.assemble import open_run
from gptpar.run.loop import StepListener
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
    a, b = torch.randn(128, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b.t())
        best = min(best, time.perf_counter() - start)
    return 2 * 128 * 1024 * 4096 / best


@dataclass(frozen=True)
class Pace:
    """The duration of training steps on a CPU now, beside whatever else runs there.

    Attributes:
        seconds_a_parameter: of a step of :data:`CPU_STEP`, which takes time in proportion to the model's parameters.
        slowness: time that passes for a thread over the time that a core gives it; 1 on a machine that does nothing
            else.
    """

    seconds_a_parameter: float
    slowness: float


CPU_STEP = {"seq-length": "64", "micro-batch-size": "2", "global-batch-size": "2"}
_FEW_LAYERS = "--preset 350M --num-layers 4 --vocab-size 512 --attention-dropout 0 --hidden-dropout 0"
_STEPS = "--warmup-steps 1 --steps 3"
SLOWNESS_SECONDS = 0.2


class _StepEnds(StepListener):
    """Notes when each step of a run ends."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self) -> None:
        self.at.append(time.perf_counter())


def measure_pace(precision: str) -> Pace:
    """Train four of the 350M model's layers for a few steps, by pretrain's own code, and time them but the first."""
    size = " ".join(f"--{name} {value}" for name, value in CPU_STEP.items())
    precision_flag = "" if precision == "fp32" else f"--{precision}"
    parsed = parse(f"{_FEW_LAYERS} {size} {precision_flag} {_STEPS}".split())
    config, derived = resolve(parsed, 1)
    ends = _StepEnds()
    with contextlib.redirect_stdout(io.StringIO()), open_run(config, derived, []) as run:
        run.train(each_step=ends)
        parameters = gpt_model(run.config.model).num_parameters
    return Pace((ends.at[-1] - ends.at[0]) / (len(ends.at) - 1) / parameters, _slowness())


def _slowness() -> float:
    start, work = time.perf_counter(), time.thread_time()
    while (done := time.thread_time() - work) < SLOWNESS_SECONDS:
        pass
    return max(1.0, (time.perf_counter() - start) / done)


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
