"""Builds the CPU optimizer of a GPT or a module, and refuses it where host memory or disk is too small."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gptpar.config import OffloadConfig
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


class Names(NamedTuple):
    """The settings' names in the user's configuration, for errors."""

    asker: str = "--cpu-optimizer"
    speculation: str = "--offload-speculation on"
    ratio: str = "--cpu-optimizer-ratio"


FLAGS = Names()


def make_host_optimizer(
    offload: OffloadConfig,
    updates: Sequence[Update],
    partitions: Sequence[OffloadedPartition],
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
    partial_unit: Unit | None = None,
    *,
    clip_grad: float,
    itemsize: int,
    summed_on_host: Collection[str] | None = None,
    activation_bytes: int = 0,
    names: Names = FLAGS,
) -> HostOptimizer | None:
    """The CPU optimizer, or ``None`` if nothing is offloaded.

    Args:
        updates: by parameter group.
        partitions: in forward order.
        parameters: unit -> the model's parameters on the device, of the same length as the unit's partition.
        dtype: of the model's parameters.
        wide: of master weights and optimizer state.
        partial_unit: the unit whose partial gradient will be submitted.
        itemsize: bytes of the widest element that is copied, in a gradient or in new parameters.
        summed_on_host: units whose sums over micro-batches are formed on the host; ``None``: it forms no sums.
        activation_bytes: of host memory that activations will take.

    Raises:
        GptparError: the host's memory, or the disk, does not suffice. It is raised before the state is allocated.
    """
    elements = sum(partition.length for partition in partitions)
    kept = sum(
        dtype.itemsize * partition.length
        for partition in partitions
        if partial_unit and partition.unit == partial_unit.name
    )
    if not elements:
        return None
    at_once = offload.gradients_leave_at_once and summed_on_host is None
    transfer_bytes = copying_bytes(elements, itemsize, len(partitions)) if at_once else RING_BYTES
    if summed_on_host is not None:
        summed = sum(partition.length for partition in partitions if partition.unit in summed_on_host)
        transfer_bytes = sums_bytes(summed, wide.itemsize, itemsize)
    transfer_bytes += activation_bytes
    size = StateSize.of(partitions, updates, wide.itemsize)
    return build_host_optimizer(
        updates,
        partitions,
        parameters,
        device,
        itemsize,
        wide,
        clip_grad=clip_grad,
        folder=None if offload.optimizer_nvme_path is None else Path(offload.optimizer_nvme_path),
        threads=offload.cpu_optimizer_threads,
        speculated_elements=_speculated_elements(offload, size, kept, transfer_bytes, names),
        partial_unit=None if partial_unit is None else partial_unit.name,
        gradients_leave_at_once=at_once,
        sums=summed_on_host,
    )


def _speculated_elements(
    offload: OffloadConfig, size: StateSize, kept: int = 0, transfer_bytes: int = RING_BYTES, names: Names = FLAGS
) -> int:
    """The number of elements whose double buffers fit in memory; see ``--offload-speculation``."""
    remedy = f"lower {names.ratio} (now {offload.least_ratio:g}), use more processes with ZeRO or a smaller model"
    if offload.optimizer_nvme_path is not None:
        needed, free = size.num_bytes * place_on_machine()[1], shutil.disk_usage(offload.optimizer_nvme_path).free
        if free < needed:
            raise GptparError(
                f"{names.asker}: this machine's processes need {format_bytes(needed)} in {offload.optimizer_nvme_path} "
                f"and {format_bytes(free)} are free: {remedy}, or free some."
            )
        return 0
    return room_for_speculation(
        size,
        offload.offload_speculation,
        kept,
        transfer_bytes=transfer_bytes,
        asker=names.asker,
        option=names.speculation,
        remedy=remedy,
    )
