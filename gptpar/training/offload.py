"""Builds the host's share of the optimizer as the configuration and the machine allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptpar.config import Config
from gptpar.optim.buckets import HostPiece
from gptpar.optim.host_share import HostShare
from gptpar.optim.placement import build_host_share, room_beside


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
    return build_host_share(
        pieces,
        device,
        dtype.itemsize,
        wide,
        clip_grad=config.optimizer.clip_grad,
        threads=config.offload.cpu_optimizer_threads,
        speculated_elements=_speculated_elements(config, elements, wide),
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
