"""Prints DeepSpeed's ZeRO-2 and ZeRO-3 estimates of the memory of a model's states, beside gptpar's prediction.

Takes the flags of ``gptpar plan``:
``python tools/estimate_memory.py --preset 2.7B --micro-batch-size 1 --bf16 --world-size 8``.

The formulas are those of DeepSpeed 0.19.8 (estimate_zero2_model_states_mem_needs and estimate_zero3_...), with their
buffer factor of 1.5 for the host. They count no activations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.system.command_line import needed_packages, run

with needed_packages():
    from gptpar.cli.plan import make_planner
    from gptpar.deepspeed.memory_estimates import Estimate, zero2, zero3
    from gptpar.model.gpt import gpt_model
    from gptpar.model.layer_spec import build_on_meta
    from gptpar.plan.planner import Plan
    from gptpar.reporting.banner import format_count

GIB = 2**30


def largest_module(plan: Plan) -> int:
    """Number of parameters of the module that owns the most directly."""
    layers = (build_on_meta(spec) for spec in gpt_model(plan.job.config.model).specs)
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
    parameters, largest = plans[2].job.num_parameters, largest_module(plans[2])
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
