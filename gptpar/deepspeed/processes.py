"""``deepspeed.init_distributed``: the processes meet, before anything else."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from gptpar.errors import ConfigError
from gptpar.topology.world import join_world, world_from_environment

PORT = 29500
"""DeepSpeed's default port of the first process."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: datetime.timedelta = dist.default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Let ``torch.distributed`` meet the other processes, unless it has; a process alone makes a group of one.

    A process that no launcher has started is a group of one, and gets a launcher's variables (RANK, LOCAL_RANK,
    WORLD_SIZE), which programs read.

    Args:
        dist_backend: default, and ``nccl``: NCCL for tensors on GPUs, gloo for others. ``gloo``: engines are on the
            CPU.
        auto_mpi_discovery, verbose, config: without effect: mpirun's processes without RANK and WORLD_SIZE are refused.
        distributed_port: of the first process, if the environment has no ``MASTER_PORT``.
        timeout: how long collectives wait for other processes.
        init_method, rank, world_size: as ``torch.distributed.init_process_group`` has them.
        dist_init_required: ``False``: the program has initialised it already.

    Raises:
        ConfigError: ``dist_init_required`` is ``False``, and torch.distributed is not initialised.
        GptparError: the environment is wrong, or the processes did not meet.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            [
                "dist_init_required is False, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first, or leave dist_init_required out."
            ]
        )
    backend = dist_backend
    if backend in (None, "nccl"):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if init_method is not None:
        dist.init_process_group(backend, init_method, timeout, world_size, rank)
        return
    if rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        world_from_environment()  # refuses one without the other, and processes that would each train by themselves
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        join_world(timeout.total_seconds() / 60, backend)
