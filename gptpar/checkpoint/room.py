"""How much memory copies of a state may take beside the training that goes on."""

from __future__ import annotations

import torch

from gptpar.system.host import available_memory, place_on_machine

HOST_RESERVE = 2 << 30
DEVICE_RESERVE = 2 << 30
"""Bytes that copies leave free: training may still need some."""


def host_room(held: int = 0) -> int:
    """Bytes of host memory that this process may fill with copies, with what it holds for them already."""
    return max(0, (available_memory() - HOST_RESERVE) // place_on_machine()[1] + held)


def device_room(device: torch.device, most_used: int) -> int:
    """Bytes of a GPU's memory that may be filled with copies.

    Args:
        most_used: bytes that the training used at most: between two steps less, but the next one needs them again.
    """
    unused = torch.cuda.memory_reserved(device) - most_used
    return max(0, torch.cuda.mem_get_info(device)[0] + unused - DEVICE_RESERVE)


class DeviceRoom:
    """Remembers what training used of a GPU at most, clones left out."""

    def __init__(self) -> None:
        self._most_used, self._most_cloned = 0, 0

    def may_clone(self, device: torch.device, num_bytes: int) -> bool:
        """Whether a GPU has room for so many bytes of copies beside the training; they count as made."""
        used = torch.cuda.max_memory_allocated(device) - self._most_cloned  # earlier copies may have been part of it
        self._most_used = max(self._most_used, used)
        if num_bytes > device_room(device, self._most_used):
            return False
        self._most_cloned = max(self._most_cloned, num_bytes)
        return True
