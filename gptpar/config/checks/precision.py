"""Number formats and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config
from gptpar.config.graph import graph_obstacles


def check_precision(config: Config, world_size: int) -> Iterator[str]:
    """Number formats and the loss scale."""
    p = config.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one number format."
    if p.loss_scale is not None and not p.fp16:
        yield f"--loss-scale {p.loss_scale:g} has a meaning with --fp16 only."
    if p.initial_loss_scale < p.min_loss_scale:
        yield (f"--initial-loss-scale {p.initial_loss_scale:g} must be at least --min-loss-scale {p.min_loss_scale:g}.")
    if p.fp64 and config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16 rounds the gradients that --fp64 is to keep exact: drop one of them."
    if p.cuda_graph == "on":
        for obstacle in graph_obstacles(config, config.parallel.data_parallel_size(world_size)):
            yield f"--cuda-graph on: {obstacle}."
