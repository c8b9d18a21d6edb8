"""Builds the CPU optimizer from the configuration, and refuses it where host memory or disk is too small."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gptpar.config import Config
from gptpar.engine.units import Unit
from gptpar.errors import GptparError
from gptpar.offload.buckets import StateSize
from gptpar.offload.copying_transfers import copying_bytes
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.host_sums import sums_bytes
from gptpar.offload.machine import build_host_optimizer, room_for_speculation
from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.optim.update import Update
from gptpar.reporting.banner import format_bytes
from gptpar.system.host import place_on_machine


def make_host_optimizer(
    config: Config,
    updates: Sequence[Update],
    partitions: Sequence[OffloadedPartition],
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
    partial_unit: Unit | None = None,
    *,
    sums: bool = True,
    host_sums: bool = False,
    activation_bytes: int = 0,
) -> HostOptimizer | None:
    """The CPU optimizer, or ``None`` if nothing is offloaded.

    Args:
        updates: by parameter group.
        partitions: in forward order.
        parameters: unit -> the model's parameters on the device, of the same length as the unit's partition.
        dtype: of the model's parameters.
        wide: of master weights and optimizer state.
        partial_unit: the unit whose partial gradient will be submitted.
        sums: whether gradients are sums, which may be copied to the host in the dtype of the master weights.
        host_sums: whether the sums over micro-batches are formed on the host.
        activation_bytes: of host memory that activations will take.

    Raises:
        GptparError: the host's memory does not suffice. It is raised before the state is allocated.
    """
    elements = sum(partition.length for partition in partitions)
    kept = sum(
        dtype.itemsize * partition.length
        for partition in partitions
        if partial_unit and partition.unit == partial_unit.name
    )
    if not elements:
        return None
    itemsize = (wide if sums else dtype).itemsize
    at_once = config.offload.gradients_leave_at_once and not host_sums
    transfer_bytes = copying_bytes(elements, itemsize, len(partitions)) if at_once else RING_BYTES
    if host_sums:
        transfer_bytes = sums_bytes(elements, wide.itemsize, itemsize)
    transfer_bytes += activation_bytes
    return build_host_optimizer(
        updates,
        partitions,
        parameters,
        device,
        itemsize,
        wide,
        clip_grad=config.optimizer.clip_grad,
        folder=None if config.offload.optimizer_nvme_path is None else Path(config.offload.optimizer_nvme_path),
        threads=config.offload.cpu_optimizer_threads,
        speculated_elements=_speculated_elements(
            config,
            StateSize.of(partitions, updates, wide.itemsize),
            kept,
            transfer_bytes,
        ),
        partial_unit=None if partial_unit is None else partial_unit.name,
        gradients_leave_at_once=at_once,
        sums=host_sums,
    )


def _speculated_elements(config: Config, size: StateSize, kept: int = 0, transfer_bytes: int = RING_BYTES) -> int:
    """The number of elements whose double buffers fit in memory; see ``--offload-speculation``."""
    if config.offload.optimizer_nvme_path is not None:
        _require_disk(Path(config.offload.optimizer_nvme_path), size.num_bytes * place_on_machine()[1])
        return 0
    ratio = config.offload.least_ratio
    return room_for_speculation(
        size,
        config.offload.offload_speculation,
        kept,
        transfer_bytes=transfer_bytes,
        asker="--cpu-optimizer",
        option="--offload-speculation on",
        remedy=f"lower --cpu-optimizer-ratio {ratio:g}, use more processes with ZeRO, or a smaller model",
    )


def _require_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise GptparError(
            f"--optimizer-nvme-path {folder}: this machine's processes need {format_bytes(needed)} there and "
            f"{format_bytes(free)} are free: lower --cpu-optimizer-ratio, or free some."
        )
