"""DeepSpeed's ``initialize``, and its small helpers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from gptpar.deepspeed.engines.initialize import Initialized
from gptpar.deepspeed.engines.initialize import initialize as initialize_engine
from gptpar.deepspeed.engines.schedulers import SCHEDULERS
from gptpar.deepspeed.leaf_modules import mark_configured
from gptpar.deepspeed.processes import PORT, init_distributed
from gptpar.deepspeed.settings import get_log_level
from gptpar.deepspeed.zero_parameters import end_init, mark_trained, owner_of, take_recording
from gptpar.errors import ArgumentError, UsageError
from gptpar.system.host import peak_process_memory

Called = TypeVar("Called", bound=Callable[..., Any])

HAS_TRITON = False
"""Whether DeepSpeed's inference kernels are there."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""DeepSpeed's file of variables for all machines, which accelerate writes."""

torch_info = {
    "version": torch.__version__,
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0",
}
"""What DeepSpeed was built with; gptpar is not built for a version of torch."""

VALID_LR_SCHEDULES = [*SCHEDULERS]

DeepSpeedOptimizerCallable: TypeAlias = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable: TypeAlias = Callable[[torch.optim.Optimizer], Any]

logger = logging.getLogger("DeepSpeed")


def initialize(
    args: Any = None,
    model: nn.Module | Sequence[Any] | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """``deepspeed.initialize``: :func:`gptpar.initialize` after :func:`init_distributed`.

    A model that was built under ``zero.Init`` gets its values here, after that block. With ZeRO-3 its parameters have
    DeepSpeed's attributes ``ds_id``, ``ds_shape``, ``ds_numel`` and ``ds_status``. A model that an engine trains goes
    over to the new one: once the configuration is checked, the former engine is closed, with a warning.

    A ``zero.Init`` around it ends here, so that what is built after it in the same block has memory.

    Raises:
        UsageError: there is no model.
    """
    if model is None:
        raise UsageError("deepspeed.initialize needs a model: a torch.nn.Module, or a list of layers.")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    end_init()
    former = _former_engine(model) if isinstance(model, nn.Module) else None
    recording = take_recording(model) if isinstance(model, nn.Module) else None
    found = initialize_engine(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
        recording=recording,
        former=former,
    )
    engine = found[0]
    if level := get_log_level(engine.config):
        try:
            set_log_level_from_string(level)
        except ArgumentError:
            engine.close()
            raise
    mark_trained(engine)
    if engine.zero_optimization_stage() == 3:
        mark_configured(engine.module, engine.config["zero_optimization"].get("leaf_module", {}))
    if (grid := getattr(engine.module, "grid", None)) is not None:
        engine.mpu = grid
    return found


def _former_engine(model: nn.Module) -> Any:
    """The engine that has trained this whole model so far; ``None``: there is none."""
    former = next((owner_of(parameter).engine for parameter in model.parameters()), None)
    return former if former is not None and former.module is model else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks: all of them if -1 is among them, by default the first."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank in (ranks or [0]) or -1 in (ranks or ()):
        logger.log(level, f"[Rank {rank}] {message}")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default DeepSpeed's, and of its handlers.

    Args:
        log_level_str: ``debug``, ``info``, ``warning``, ``error`` or ``critical``, in any case.

    Raises:
        ArgumentError: there is no such level.
    """
    level, chosen = logging.getLevelNamesMapping().get(str(log_level_str).upper()), custom_logger or logger
    if level is None:
        raise ArgumentError(f"log_level {log_level_str!r} is none of debug, info, warning, error and critical.")
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory that this process has taken, on the first rank, if ``force``."""
    if force and (not dist.is_initialized() or dist.get_rank() == 0):
        here = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        print(
            f"{message}: {here:.2f} GiB on the GPU, at most {(peak_process_memory() or 0) / 2**30:.2f} GiB on the host"
        )


def instrument_w_nvtx(function: Called) -> Called:
    """The function itself: `gptpar benchmark --trace` and torch.profiler show calls by name."""
    return function


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Nested tensors on a device; with ``criterion_func`` those alone for which it is true."""
    chosen = criterion_func or (lambda tensor: True)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device) if chosen(tensor) else tensor, item)


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The groups as a list: a model without ``MoE`` has no experts that need groups of their own."""
    return [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)


def is_moe_param(param: Any) -> bool:
    """Whether a parameter, or a group, is of one process's experts: none is."""
    return False


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """(whether a module has a layer ``MoE``, the number of its experts)"""
    return False, 0


def is_compile_supported() -> bool:
    """Whether torch can compile modules."""
    return hasattr(torch, "compile")


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's version, such as 2.4, is not below the one and not above the other."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    lowest, highest = (_two_numbers(one) for one in (min_version, max_version))
    return (lowest is None or version >= lowest) and (highest is None or version <= highest)


def _two_numbers(version: float | None) -> tuple[int, ...] | None:
    return None if version is None else tuple(int(part) for part in str(version).split("."))


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's random numbers."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
