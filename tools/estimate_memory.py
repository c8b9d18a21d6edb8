"""Memory for a model's states by DeepSpeed's ZeRO-2 and ZeRO-3 estimators, beside what gptpar really lays out.

Takes the flags of ``gptpar plan``:
``python tools/estimate_memory.py --preset 2.7B --micro-batch-size 1 --bf16 --world-size 8``.

The formulas are those of DeepSpeed 0.19.8 (estimate_zero2_model_states_mem_needs and estimate_zero3_...), with their
buffer factor of 1.5 for the host. They count no activations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.command import run
from gptpar.model.flops import num_parameters
from gptpar.model.gpt import gpt_layers
from gptpar.pipeline.stage import build_on_meta
from gptpar.plan.main import make_planner
from gptpar.plan.planner import Plan
from gptpar.reporting.banner import format_count

HOST_FACTOR = 1.5
GIB = 2**30


class Estimate(NamedTuple):
    """Bytes of a machine's memory and of one GPU's, and with which options."""

    host: float
    gpu: float
    options: str


def zero2(parameters: int, nodes: int, gpus: int) -> Iterator[Estimate]:
    """DeepSpeed's rows for ZeRO-2.

    Args:
        parameters: of the model.
        nodes: machines.
        gpus: GPUs of a machine.
    """
    world = nodes * gpus
    yield Estimate(parameters * max(4 * world, 16) * HOST_FACTOR, 2 * parameters, "offload_optimizer=cpu")
    on_gpu = 2 * parameters + 18 * parameters // world
    yield Estimate(parameters * 4 * gpus * HOST_FACTOR, on_gpu, "offload_optimizer=none")


def zero3(parameters: int, largest: int, nodes: int, gpus: int) -> Iterator[Estimate]:
    """DeepSpeed's rows for ZeRO-3.

    Args:
        largest: parameters of the largest module, which are brought together at a time.
    """
    world = nodes * gpus
    for param, optimizer, states in (("cpu", "cpu", 0), ("none", "cpu", 2), ("none", "none", 18)):
        on_gpu = 4 * largest + states * parameters // world
        for zero_init in (1, 0):
            whole_copies = parameters * 4 * gpus
            if optimizer == "none":
                host = largest * 4 * gpus if zero_init else whole_copies
            else:
                kept = parameters * (18 if param == "cpu" else 16) / nodes
                host = kept if zero_init else max(whole_copies, kept)
            options = f"offload_param={param:<4}, offload_optimizer={optimizer:<4}, zero_init={zero_init}"
            yield Estimate(host * HOST_FACTOR, on_gpu, options)


def largest_module(plan: Plan) -> int:
    """Parameters of the module that holds the most of its own."""
    layers = (build_on_meta(spec) for spec in gpt_layers(plan.job.config.model))
    return max(
        sum(p.numel() for p in module.parameters(recurse=False)) for layer in layers for module in layer.modules()
    )


def table(title: str, estimates: Iterator[Estimate]) -> str:
    """Rows of GiB."""
    rows = [f"{e.host / GIB:10.2f} {e.gpu / GIB:9.2f}  {e.options}" for e in estimates]
    return "\n".join([title, "  host GiB   GPU GiB  options", *rows])


def main(argv: list[str]) -> int:
    """Print the tables."""
    planner, options = make_planner(argv)
    nodes, gpus = max(1, options.world_size // options.gpus_per_node), min(options.gpus_per_node, options.world_size)
    plans = {stage: planner.plan({"parallel.zero_stage": stage}) for stage in (2, 3)}
    parameters, largest = num_parameters(plans[2].job.shape), largest_module(plans[2])
    print(f"{format_count(parameters)} parameters, largest module {format_count(largest)}, {nodes} x {gpus} GPUs")
    tables = {2: zero2(parameters, nodes, gpus), 3: zero3(parameters, largest, nodes, gpus)}
    for stage, estimates in tables.items():
        print(table(f"\nZeRO-{stage}, DeepSpeed's estimate of states", estimates))
        memory = plans[stage].memory[plans[stage].worst_stage]
        states = memory.parameters + memory.gradients + memory.optimizer
        print(
            f"ZeRO-{stage}, gptpar: states {states / GIB:.2f}, activations {memory.activations / GIB:.2f}, buffers "
            f"{memory.buffers / GIB:.2f}, outside {memory.outside / GIB:.2f}: {memory.total / GIB:.2f} GiB a GPU"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
