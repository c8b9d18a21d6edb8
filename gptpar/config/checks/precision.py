"""Checks number formats and the loss scale, and lists what forbids CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config, Flags


def check_precision(flags: Flags, world_size: int) -> Iterator[str]:
    """Number formats and the loss scale."""
    p = flags.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one number format."
    if p.initial_loss_scale < p.min_loss_scale:
        yield (f"--initial-loss-scale {p.initial_loss_scale:g} must be at least --min-loss-scale {p.min_loss_scale:g}.")
    if p.fp64 and flags.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16 rounds the gradients that --fp64 is to keep exact: drop one of them."
    if p.deterministic_mode and flags.batch.train_minutes is not None:
        yield (
            "--deterministic-mode and --train-minutes exclude each other: the number of steps, and with it the "
            "learning rate, would follow from the clock; give --train-iters alone."
        )
    if p.cuda_graph == "on":
        for obstacle in graph_obstacles(flags, flags.parallel.num_copies(world_size)):
            yield f"--cuda-graph on: {obstacle}."


def graph_obstacles(config: Flags | Config, num_copies: int) -> Iterator[str]:
    """What needs the host in the middle of a step, each as a part of a sentence.

    Args:
        num_copies: of the model's weights, on the data and context axes.
    """
    if config.model.has_dropout:
        yield "dropout is seeded by the host (set --attention-dropout 0 --hidden-dropout 0)"
    if config.model.has_experts:
        yield "tokens are brought to their experts by kernels that are not recorded yet"
    if num_copies > 1 and config.parallel.zero_stage in (2, 3):
        yield f"--zero-stage {config.parallel.zero_stage} gives and takes memory during the step (use stage 1)"
    if config.offload.cpu_optimizer and (num_copies > 1 or config.parallel.model_parallel_size > 1):
        yield "--cpu-optimizer waits for each layer, amid the messages of several processes"
    if config.offload.gradients_leave_at_once:
        yield "--offload-gradients on gives back the memory of gradients during the step"
    if config.offload.cpu_parameters:
        yield "--cpu-parameters brings and drops them during the step"
    if config.recompute.checkpoint_in_cpu:
        yield "--checkpoint-in-cpu asks for host memory during the step"
    if config.batch.rampup_batch_size is not None:
        yield "--rampup-batch-size changes the number of micro-batches"
    if config.batch.batch_sizes is not None:
        yield "--step-batch-size-schedule changes the number of micro-batches"
