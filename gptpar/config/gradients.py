"""Whether gradients are added up, and whether they can leave the device as soon as they are final. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config


def adds_gradients(config: Config, world_size: int) -> bool:
    """Whether a step's gradient is a sum, over micro-batches or processes.

    Sums are kept in fp32 or wider. A gradient that comes once is kept as it comes: it gains nothing by being widened.
    """
    batch = config.batch
    grows = batch.rampup_batch_size is not None or batch.batch_sizes is not None
    return world_size > 1 or grows or batch.global_batch_size != batch.micro_batch_size


def offload_gradients_obstacles(config: Config, world_size: int) -> Iterator[str]:
    """What keeps gradients on the device until they are used, each as a part of a sentence.

    Sums are formed on the device: they are there during the whole step anyway.
    """
    batch = config.batch
    if world_size > 1:
        yield f"{world_size} processes add up their gradients on the GPU (use one process, or --offload-gradients off)"
    elif adds_gradients(config, world_size):
        yield (
            f"a step of several micro-batches adds up their gradients on the GPU (set --micro-batch-size "
            f"{batch.micro_batch_size} and --global-batch-size {batch.global_batch_size} to one number, without a "
            "schedule of batch sizes)"
        )
