"""Whether gradients are added up. Pure."""

from __future__ import annotations

from gptpar.config import Config


def adds_gradients(config: Config, world_size: int) -> bool:
    """Whether a step's gradient is a sum, over micro-batches or processes.

    Sums are kept in fp32 or wider. A gradient that comes once is kept as it comes: it gains nothing by being widened.
    """
    batch = config.batch
    grows = batch.rampup_batch_size is not None or batch.batch_sizes is not None
    return world_size > 1 or grows or batch.global_batch_size != batch.micro_batch_size
