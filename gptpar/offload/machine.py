"""Fits the CPU optimizer to the machine: its cores, its transfers, and the share of host memory that it may take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from gptpar.errors import GptparError
from gptpar.offload.buckets import BUCKET_ELEMENTS, StateSize
from gptpar.offload.copying_transfers import CopyingGpuTransfers, CopyingSameMemory, max_bytes_waiting
from gptpar.offload.gpu_transfers import RING_BYTES, GpuTransfers, summed_ring_bytes
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.transfers import SameMemory, Transfers
from gptpar.optim.cpu_adam import default_threads
from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.optim.torch_kernels import make_host_kernel
from gptpar.optim.update import Update
from gptpar.reporting.banner import format_bytes
from gptpar.system.host import available_memory, cores_of_process, place_on_machine

KEPT_FREE = 0.1
"""Fraction of the host's free memory that the CPU optimizer leaves to everything else."""


def build_host_optimizer(
    updates: Sequence[Update],
    partitions: Sequence[OffloadedPartition],
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
    itemsize: int,
    wide: torch.dtype,
    *,
    clip_grad: float,
    folder: Path | None = None,
    threads: int | None = None,
    speculated_elements: int = 0,
    partial_unit: str | None = None,
    gradients_leave_at_once: bool = False,
    sums: Collection[str] | None = None,
) -> HostOptimizer:
    """The CPU optimizer on this process's cores, with copies to and from the device.

    Args:
        updates: by parameter group.
        partitions: in forward order, at least one.
        parameters, partial_unit, sums: see :class:`HostOptimizer`.
        itemsize: bytes of the widest element that is copied, in a gradient or in new parameters.
        wide: dtype of master weights and optimizer state.
        folder: for files that hold the state; ``None``: the state is in memory.
        threads: of the kernel; default: :func:`~gptpar.optim.cpu_adam.default_threads`.
        gradients_leave_at_once: see :mod:`gptpar.offload.copying_transfers`.
    """
    place, count = place_on_machine()
    cores = cores_of_process(place, count)
    kernels = {update: make_host_kernel(update, threads or default_threads(cores)) for update in updates}
    return HostOptimizer(
        partitions,
        parameters,
        dtype=wide,
        clip_grad=clip_grad,
        kernels=[kernels[update] for update in updates],
        transfers=_make_transfers(partitions, device, itemsize, gradients_leave_at_once, sums),
        folder=folder,
        cores=cores if count > 1 else None,
        speculated_elements=speculated_elements,
        partial_unit=partial_unit,
        sums=sums,
    )


def _make_transfers(
    partitions: Sequence[OffloadedPartition],
    device: torch.device,
    itemsize: int,
    at_once: bool,
    sums: Collection[str] | None,
) -> Transfers:
    lengths = [partition.length for partition in partitions]
    if device.type == "cpu" and at_once:
        return CopyingSameMemory(max_bytes_waiting(lengths, itemsize))
    if device.type == "cpu":
        return SameMemory()
    if at_once:
        return CopyingGpuTransfers(device, lengths, itemsize)
    buckets = sum(-(-length // BUCKET_ELEMENTS) for length in lengths)
    summed = sum(partition.length for partition in partitions if partition.unit in (sums or ()))
    ring = summed_ring_bytes(itemsize * summed)
    return GpuTransfers(device, buckets, min(BUCKET_ELEMENTS, max(lengths)) * itemsize, ring)


def room_for_speculation(
    size: StateSize, wish: str, kept: int = 0, *, transfer_bytes: int = RING_BYTES, asker: str, option: str, remedy: str
) -> int:
    """The number of offloaded elements whose double buffers fit in host memory.

    Args:
        size: of the offloaded elements' state.
        wish: ``off``, ``on`` or ``auto`` (as many as fit).
        kept: bytes of host memory for speculated parameters that wait for the commit.
        transfer_bytes: of host memory for gradients, parameters and activations on their way.
        asker, option, remedy: words of the error: who needs the memory, the option that asks for speculation, a remedy.

    Raises:
        GptparError: the free memory does not suffice.
    """
    _, processes = place_on_machine()
    free = int(available_memory() * (1 - KEPT_FREE)) // processes
    state, elements = size.num_bytes, size.elements
    room = free - state - transfer_bytes
    needed = state + elements * size.element_bytes + kept if wish == "on" else state
    if free and room < needed - state:
        what = "master weights and optimizer state" + (f", twice for {option}" if wish == "on" else "")
        what += f" of {elements + size.later:,} elements"
        raise GptparError(
            f"{asker} needs {format_bytes(needed + transfer_bytes)} of host memory in each of {processes} process(es) "
            f"on this machine ({what}, and {format_bytes(transfer_bytes)} for transfers), and {format_bytes(free)} are "
            f"free for each: {remedy}."
        )
    if wish == "off":
        return 0
    return elements if wish == "on" or not free else min(elements, max(0, room - kept) // max(1, size.element_bytes))
