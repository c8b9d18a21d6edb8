"""Page-locked host memory, which a GPU reads and writes by itself while everything else goes on."""

from __future__ import annotations

import torch

from gptpar import pages
from gptpar.errors import GptparError


class PinnedMemory:
    """A stretch of page-locked memory of the size asked for; torch's own allocator rounds to powers of two.

    Its pages hold nothing else: none can be locked twice.

    Attributes:
        data: [num_bytes], uint8, zeros.

    Raises:
        GptparError: the system does not allow so much of it.
    """

    def __init__(self, num_bytes: int):
        self.data = pages.zeros(num_bytes)
        if not num_bytes:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), num_bytes, 0))
        if status != 0:
            raise GptparError(
                f"cannot lock {num_bytes >> 20} MiB of host memory for transfers (CUDA error {status}): raise the "
                "limit of locked memory (ulimit -l), or offload less."
            )

    def close(self) -> None:
        """Unlock it; nothing may be on its way."""
        if self.data.numel():
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())


class _AsDeviceMemory:
    def __init__(self, tensor: torch.Tensor):
        place = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = place


def as_device_memory(pinned: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in page-locked memory as one that kernels can write to; the memory must outlive it."""
    seen: torch.Tensor = torch.as_tensor(_AsDeviceMemory(pinned), device="cuda")
    return seen.view(pinned.dtype).view(pinned.shape)


def host_tensors(lengths: dict[str, int], dtype: torch.dtype, *, pinned: bool) -> dict[str, torch.Tensor]:
    """Zeros in host memory, one vector for each name, all in one piece."""
    total = sum(lengths.values())
    num_bytes = total * dtype.itemsize
    memory = PinnedMemory(num_bytes).data if pinned else torch.zeros(num_bytes, dtype=torch.uint8)
    return dict(zip(lengths, memory.view(dtype).split(list(lengths.values())), strict=True))
