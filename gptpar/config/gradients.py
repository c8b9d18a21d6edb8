"""In which number format gradients are kept."""

from __future__ import annotations

from gptpar.config import Config


def adds_gradients(config: Config, world_size: int) -> bool:
    """Whether a step's gradient is a sum, over micro-batches or processes: then it is kept in fp32."""
    batch = config.batch
    return world_size > 1 or batch.rampup_batch_size is not None or batch.global_batch_size != batch.micro_batch_size
