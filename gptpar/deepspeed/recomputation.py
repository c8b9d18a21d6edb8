"""``deepspeed.checkpointing``: recomputation of activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gptpar.config.deepspeed_reader import part_of
from gptpar.deepspeed.settings import DeepSpeedConfig
from gptpar.errors import ConfigError
from gptpar.pipeline.recompute import Keep, recomputed

_configured: dict[str, Keep] = {}
"""How inputs are kept, after :func:`configure`: DeepSpeed's functions are a process's, not an object's."""


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose how :func:`checkpoint` keeps the inputs of what it recomputes.

    Args:
        mpu_, partition_activations: without effect: no other process has the same activations.
        deepspeed_config: a path or a dictionary, whose section ``activation_checkpointing`` counts.
        contiguous_checkpointing, num_checkpoints, synchronize, profile: without effect: torch's allocator is enough.
        checkpoint_in_cpu: keep them in host memory.

    Raises:
        ConfigError: ``contiguous_checkpointing`` without ``num_checkpoints``, as in DeepSpeed.
    """
    section = part_of(DeepSpeedConfig(deepspeed_config).raw, "activation_checkpointing") if deepspeed_config else {}
    if contiguous_checkpointing and not (num_checkpoints or section.get("number_checkpoints")):
        raise ConfigError(["contiguous_checkpointing needs num_checkpoints: give both, or leave both out."])
    in_cpu = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    _configured["keep"] = Keep(to_cpu=bool(in_cpu))


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Nothing: each :func:`checkpoint` frees its memory in the backward pass."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose activations are computed again in the backward pass, with equal dropout."""
    keep = _configured.get("keep", Keep())
    call = partial(function, **kwargs) if kwargs else function
    if args and isinstance(args[0], torch.Tensor):
        return recomputed(call, *args, keep=keep)
    return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint
