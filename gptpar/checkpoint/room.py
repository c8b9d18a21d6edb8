"""Limits the host and GPU memory that a save may use for copies of the state while training goes on."""

from __future__ import annotations

import torch

from gptpar.system.host import available_memory, place_on_machine

HOST_RESERVE = 2 << 30
DEVICE_RESERVE = 2 << 30
"""Bytes that copies leave free, because training may need more memory later."""


def host_room(held: int = 0) -> int:
    """Bytes of host memory that this process may use for copies.

    Args:
        held: bytes that this process has for copies already; they are part of the result.
    """
    return max(0, (available_memory() - HOST_RESERVE) // place_on_machine()[1] + held)


def device_room(device: torch.device, most_used: int) -> int:
    """Bytes of a GPU's memory that this process may use for copies.

    Args:
        most_used: peak bytes of training. Between two steps it uses less, but the next step needs them again.
    """
    unused = torch.cuda.memory_reserved(device) - most_used
    return max(0, torch.cuda.mem_get_info(device)[0] + unused - DEVICE_RESERVE)


class DeviceRoom:
    """Remembers the peak of a GPU's memory that training used, without clones."""

    def __init__(self) -> None:
        self._most_used, self._most_cloned = 0, 0

    def may_clone(self, device: torch.device, num_bytes: int) -> bool:
        """Whether a GPU has room for ``num_bytes`` of clones beside training; if so, they count as made."""
        used = torch.cuda.max_memory_allocated(device) - self._most_cloned  # earlier clones may be part of the peak
        self._most_used = max(self._most_used, used)
        if num_bytes > device_room(device, self._most_used):
            return False
        self._most_cloned = max(self._most_cloned, num_bytes)
        return True
