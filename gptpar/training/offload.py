"""Builds the host's share of the optimizer as the configuration and the machine allow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from gptpar.config import Config
from gptpar.errors import GptparError
from gptpar.host import available_memory, place_on_machine, share_of_cores
from gptpar.optim.buckets import BUCKET_ELEMENTS, HostPiece
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.host_share import HostShare
from gptpar.optim.transfers import RING_BYTES, GpuTransfers, SameMemory, Transfers
from gptpar.reporting.banner import format_bytes

KEPT_FREE = 0.1
"""Part of the host's free memory that is left to everything else."""

CORES_LEFT_FREE = 2
"""For the threads that launch the device's work: with one, the CPU optimizer held them up."""


def make_host_share(
    config: Config, pieces: Sequence[HostPiece], device: torch.device, dtype: torch.dtype, wide: torch.dtype
) -> HostShare | None:
    """The host's share, or ``None`` where it has nothing to do.

    Args:
        pieces: in forward order.
        dtype: of the live parameters.
        wide: of master weights and moments.

    Raises:
        GptparError: the host's memory does not suffice; before anything is allocated.
    """
    elements = sum(piece.length for piece in pieces)
    if not elements:
        return None
    speculated = _speculated_elements(config, elements, wide)
    place, count = place_on_machine()
    cores = share_of_cores(place, count)
    threads = config.offload.cpu_optimizer_threads or max(1, len(cores) - CORES_LEFT_FREE)
    optimizer = config.optimizer
    return HostShare(
        pieces,
        dtype=wide,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        adam=CpuAdam(threads),
        transfers=_transfers(pieces, device, dtype),
        folder=None if config.offload.optimizer_nvme_path is None else Path(config.offload.optimizer_nvme_path),
        cores=cores if count > 1 else None,
        speculated_elements=speculated,
    )


def _transfers(pieces: Sequence[HostPiece], device: torch.device, dtype: torch.dtype) -> Transfers:
    if device.type == "cpu":
        return SameMemory()
    buckets = sum(-(-piece.length // BUCKET_ELEMENTS) for piece in pieces)
    largest = min(BUCKET_ELEMENTS, max(piece.length for piece in pieces))
    return GpuTransfers(device, buckets, largest * dtype.itemsize)


def _speculated_elements(config: Config, elements: int, wide: torch.dtype) -> int:
    """For how many elements there is room beside; see ``--offload-speculation``."""
    _, processes = place_on_machine()
    free = int(available_memory() * (1 - KEPT_FREE)) // processes
    state = 3 * wide.itemsize * elements
    room = free - state - RING_BYTES
    wish = config.offload.offload_speculation
    if config.offload.optimizer_nvme_path is not None:
        _require_disk(Path(config.offload.optimizer_nvme_path), state * processes)
        return 0
    needed = 2 * state if wish == "on" else state
    if free and room < needed - state:
        what = "masters and moments, twice for --offload-speculation on" if wish == "on" else "masters and moments"
        raise GptparError(
            f"--cpu-optimizer needs {format_bytes(needed + RING_BYTES)} of host memory in each of {processes} "
            f"process(es) on this machine ({what} of {elements:,} elements, and {format_bytes(RING_BYTES)} for "
            f"transfers), and {format_bytes(free)} are free for each: lower --cpu-optimizer-ratio "
            f"{config.offload.cpu_optimizer_ratio}, use more processes with ZeRO, or a smaller model."
        )
    if wish == "off":
        return 0
    return elements if wish == "on" or not free else min(elements, room // (3 * wide.itemsize))


def _require_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise GptparError(
            f"--optimizer-nvme-path {folder}: this machine's processes need {format_bytes(needed)} there and "
            f"{format_bytes(free)} are free: lower --cpu-optimizer-ratio, or free some."
        )
