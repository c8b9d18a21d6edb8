"""Whether a step can be launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config


def graph_obstacles(config: Config, data_parallel_size: int) -> Iterator[str]:
    """What needs the host in the middle of a step, each as a part of a sentence."""
    if config.model.has_dropout:
        yield "dropout is seeded by the host (set --attention-dropout 0 --hidden-dropout 0)"
    if data_parallel_size > 1 and (config.parallel.zero_stage or 0) >= 2:
        yield f"--zero-stage {config.parallel.zero_stage} gives and takes memory during the step (use stage 1)"
    if config.offload.cpu_optimizer and (data_parallel_size > 1 or config.parallel.model_parallel_size > 1):
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


def wants_graph(config: Config, data_parallel_size: int) -> bool:
    """Whether a run on a GPU uses a graph; with ``auto``, where nothing speaks against it.

    Under ZeRO-1 alone it is slower: a recorded step has to wait for all parameters to be gathered, while one that is
    launched bit by bit waits for each layer's.
    """
    if config.precision.cuda_graph != "auto":
        return config.precision.cuda_graph == "on"
    gathers = config.parallel.zero_stage == 1 and data_parallel_size > 1
    return not any(graph_obstacles(config, data_parallel_size)) and not (
        gathers and config.parallel.model_parallel_size == 1
    )
