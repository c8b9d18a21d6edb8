"""Page-locked host memory, which a GPU reads and writes by itself while everything else goes on."""

from __future__ import annotations

import weakref

import torch

from gptpar.errors import GptparError
from gptpar.system import pages


class PinnedMemory:
    """A stretch of page-locked memory of the size asked for; torch's own allocator rounds to powers of two.

    Its pages hold nothing else: none can be locked twice.

    Attributes:
        data: [num_bytes], uint8, zeros; locked as long as this object lives.

    Raises:
        GptparError: the system does not allow so much of it.
    """

    def __init__(self, num_bytes: int):
        self.data = pages.zeros(num_bytes)
        self._unlock: weakref.finalize[..., PinnedMemory] | None = None
        if not num_bytes:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), num_bytes, 0))
        if status != 0:
            raise GptparError(
                f"cannot lock {num_bytes >> 20} MiB of host memory for transfers (CUDA error {status}): raise the "
                "limit of locked memory (ulimit -l), or offload less."
            )

        # Memory that is given back while it is locked would fail whoever gets the same addresses next.
        self._unlock = weakref.finalize(self, _unlock, self.data.data_ptr())
        self._unlock.atexit = False

    def close(self) -> None:
        """Unlock it; nothing may be on its way. It happens by itself when nobody refers to this object any more."""
        if self._unlock is not None:
            self._unlock()


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class _AsDeviceMemory:
    def __init__(self, tensor: torch.Tensor):
        place = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = place


def as_device_memory(pinned: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in page-locked memory as one that kernels can write to; the memory must outlive it."""
    seen: torch.Tensor = torch.as_tensor(_AsDeviceMemory(pinned), device="cuda")
    return seen.view(pinned.dtype).view(pinned.shape)
