"""Time AdamW on the CPU: gptpar's pass, what memory allows, torch's fused kernel and DeepSpeed's, casts included.

    PYTHONPATH=. python benchmarks/cpu_adam.py [--sizes 10 100] [--threads 1 2] [--largest] [--json FILE]

All contenders take bf16 gradients and leave fp32 states and bf16 parameters. They run in turns, each round in another
order, so that other work of the machine slows all of them alike. Each contender runs twice in its turn, and only the
second run is timed, because the first follows a pause. Medians and minima are over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.about import about
from gptpar.optim.cpu_adam import AdamStep, CpuAdam
from gptpar.system import native

HERE = Path(__file__).resolve().parent
BYTES = 3 * 4 * 2 + 2 * 2  # per element: p, m and v read and written, the gradient read, bf16 parameters written
ISAS = ("scalar", "avx2", "avx512")
MILLION = 10**6
PAUSE_S = 0.02  # OpenMP's threads spin on for a while after torch's or DeepSpeed's step
HOW = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

Contender = Callable[[int], object]  # takes the number of the step


class Buffers:
    """State, gradient, bf16 parameters and a second state of n elements, every page touched."""

    def __init__(self, n: int):
        torch.manual_seed(0)
        self.state = (torch.randn(n), torch.full((n,), 1e-3), torch.full((n,), 1e-4))
        self.other = tuple(torch.zeros(n) for _ in range(3))
        self.grad = torch.randn(n).bfloat16()
        self.low = torch.zeros(n, dtype=torch.bfloat16)
        self.grad32 = torch.zeros(n)


def bound(buffers: Buffers, threads: int, isa: str, *, apart: bool) -> Contender:
    library = native.load("bandwidth", HERE)
    outputs = buffers.other if apart else buffers.state
    tensors = (*buffers.state, *outputs, buffers.grad, buffers.low)
    addresses = (ctypes.c_void_p * 8)(*(t.data_ptr() for t in tensors))
    n = ctypes.c_int64(len(buffers.grad))
    return lambda _: library.bandwidth_pass(addresses, n, threads, ISAS.index(isa))


def ours(buffers: Buffers, adam: CpuAdam, *, apart: bool) -> Contender:
    into = buffers.other if apart else None

    def step(number: int) -> bool:
        how = AdamStep(**HOW, step=number, divisor=1.5)
        return adam.step(*buffers.state, buffers.grad, how, into=into, low=buffers.low)

    return step


def torch_fused(buffers: Buffers) -> Contender:
    parameter, *moments = buffers.state
    leaf = parameter.detach().requires_grad_()
    leaf.grad = buffers.grad32
    betas = (HOW["beta1"], HOW["beta2"])
    inner = torch.optim.AdamW(
        [leaf], lr=HOW["lr"], betas=betas, eps=HOW["eps"], weight_decay=HOW["weight_decay"], fused=True
    )
    inner.state[leaf] = {"step": torch.zeros(()), "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def step(_: int) -> None:
        buffers.grad32.copy_(buffers.grad)
        inner.step()
        buffers.low.copy_(parameter)

    return step


def deepspeed_adam(buffers: Buffers) -> Contender | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    parameter, *moments = buffers.state
    leaf = torch.nn.Parameter(parameter)
    leaf.grad = buffers.grad32
    betas = (HOW["beta1"], HOW["beta2"])
    inner = DeepSpeedCPUAdam([leaf], lr=HOW["lr"], betas=betas, eps=HOW["eps"], weight_decay=HOW["weight_decay"])
    inner.state[leaf] = {"step": 0, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def step(_: int) -> None:
        buffers.grad32.copy_(buffers.grad)
        inner.step()
        buffers.low.copy_(leaf.data)

    return step


def measure(n: int, threads: int, rounds: int) -> list[dict[str, object]]:
    """One line a contender: milliseconds of a step (median and minimum), and GB/s of the bytes that it must move."""
    torch.set_num_threads(threads)
    buffers, adam = Buffers(n), CpuAdam(threads)
    if not adam.native:
        raise SystemExit("the kernel did not compile, so there is nothing to measure")
    contenders: dict[str, Contender | None] = {
        "bound, in place": bound(buffers, threads, adam.isa, apart=False),
        "gptpar, in place": ours(buffers, adam, apart=False),
        "bound, out of place": bound(buffers, threads, adam.isa, apart=True),
        "gptpar, out of place": ours(buffers, adam, apart=True),
        "torch fused, casts": torch_fused(buffers),
        "DeepSpeed, casts": deepspeed_adam(buffers),
    }
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name, run in contenders.items() if run}
    for number in range(1, rounds + 2):  # the first round warms up
        for name in order.sample(list(times), len(times)):
            run = contenders[name]
            assert run is not None
            time.sleep(PAUSE_S)
            run(number)  # untimed, so that the pause does not count
            start = time.perf_counter()
            run(number)
            if number > 1:
                times[name].append(time.perf_counter() - start)
    return [
        {
            "contender": name,
            "elements": n,
            "threads": threads,
            "isa": adam.isa,
            "median_ms": round(statistics.median(of) * 1e3, 3),
            "min_ms": round(min(of) * 1e3, 3),
            "gb_per_s": round(BYTES * n / statistics.median(of) / 1e9, 1),
            "rounds": rounds,
        }
        for name, of in times.items()
    ]


def show(lines: list[dict[str, object]]) -> None:
    print(f"{'elements':>11} {'threads':>7}  {'':22} {'median ms':>10} {'min ms':>9} {'GB/s':>6}")
    for line in lines:
        print(
            f"{line['elements']:>11,} {line['threads']:>7}  {line['contender']:22} {line['median_ms']:>10} "
            f"{line['min_ms']:>9} {line['gb_per_s']:>6}"
        )


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], help="millions of elements")
    parser.add_argument("--largest", action="store_true", help="a billion elements as well (33 GB)")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, max(1, cores // 2), cores}))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append one JSON object a line to this file")
    arguments = parser.parse_args()
    machine = about("torch", "deepspeed")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for millions in arguments.sizes + [1000] * arguments.largest:
        for threads in arguments.threads:
            lines = measure(millions * MILLION, threads, arguments.rounds)
            show(lines)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.writelines(json.dumps({**line, **machine}) + "\n" for line in lines)


if __name__ == "__main__":
    main()
