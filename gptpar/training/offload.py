"""Builds the host's share of the optimizer as the configuration and the machine allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptpar.config import Config
from gptpar.host import place_on_machine, share_of_cores
from gptpar.optim.buckets import HostPiece
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.host_share import HostShare
from gptpar.optim.placement import CORES_LEFT_FREE, make_transfers, room_beside


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
    return HostShare(
        pieces,
        dtype=wide,
        clip_grad=config.optimizer.clip_grad,
        adam=CpuAdam(threads),
        transfers=make_transfers([piece.length for piece in pieces], device, dtype.itemsize),
        cores=cores if count > 1 else None,
        speculated_elements=speculated,
    )


def _speculated_elements(config: Config, elements: int, wide: torch.dtype) -> int:
    """For how many elements there is room beside; see ``--offload-speculation``."""
    ratio = config.offload.cpu_optimizer_ratio
    return room_beside(
        elements,
        wide,
        config.offload.offload_speculation,
        asker="--cpu-optimizer",
        option="--offload-speculation on",
        remedy=f"lower --cpu-optimizer-ratio {ratio}, use more processes with ZeRO, or a smaller model",
    )
