"""``deepspeed.checkpointing``: recomputation of activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gptpar.config.deepspeed_reader import part_of
from gptpar.deepspeed.random_states import CudaRNGStatesTracker as CudaRNGStatesTracker
from gptpar.deepspeed.random_states import get_cuda_rng_tracker, reseed_model_parallel, seed_all
from gptpar.deepspeed.settings import DeepSpeedConfig
from gptpar.errors import ConfigError
from gptpar.pipeline.host_activations import HostActivations
from gptpar.pipeline.recompute import Keep, recomputed, same_again

_configured: dict[str, Any] = {}
"""``keep`` and ``mpu`` after :func:`configure`: DeepSpeed's functions are a process's, not an object's."""


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
        mpu_: its rank among the processes that divide a layer chooses the seed of their random numbers; default:
            the one of an earlier call.
        partition_activations: without effect: no other process has the same activations.
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
    _configured.update(keep=Keep(host=HostActivations() if in_cpu else None), mpu=mpu_ or _configured.get("mpu"))


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Nothing: each :func:`checkpoint` frees its memory in the backward pass."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose activations are computed again in the backward pass, with equal dropout."""
    keep = _configured.get("keep", Keep())
    call = get_cuda_rng_tracker().drawing_again(partial(function, **kwargs) if kwargs else function)
    if args and isinstance(args[0], torch.Tensor):
        return recomputed(call, *args, keep=keep)
    return torch.utils.checkpoint.checkpoint(same_again, call, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing: no other process has the same activations."""


def set_num_layers(nlayers: int) -> None:
    """Nothing: memory is taken for each :func:`checkpoint` when it is called."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default random state, and Megatron's of the processes that divide a layer.

    The mpu that :func:`configure` got says which of them this is; without one a layer is whole.
    """
    seed_all(seed, _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin Megatron's random state again, and leave the default one."""
    reseed_model_parallel(seed, _model_parallel_rank())


def _model_parallel_rank() -> int:
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    asked = (getattr(_configured.get("mpu"), name, None) for name in names)
    return next((ask() for ask in asked if ask is not None), 0)
