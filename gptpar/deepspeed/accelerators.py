"""``deepspeed.accelerator``: the device of this machine, a GPU or the CPU, as one object."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from gptpar.system.host import available_memory, local_rank


class Accelerator:
    """This machine's device. Names that are not defined here are those of ``torch.cuda`` or ``torch.cpu``."""

    def __init__(self) -> None:
        self._is_gpu = torch.cuda.is_available()
        self._name = "cuda" if self._is_gpu else "cpu"
        self._backend: Any = torch.cuda if self._is_gpu else torch.cpu

    def __getattr__(self, name: str) -> Any:
        for home in (self._backend, torch):
            if hasattr(home, name):
                return getattr(home, name)
        if name.startswith(("memory_", "max_memory_", "reset_", "empty_", "range_")):  # the CPU counts none of these
            return lambda *args, **kwargs: 0
        raise AttributeError(f"deepspeed's accelerator has no {name!r} in gptpar")

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:0`` or ``cpu``."""
        return self._name if device_index is None or not self._is_gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context that makes a device the current one; without a number, one that changes nothing."""
        return torch.cuda.device(device_index) if self._is_gpu else contextlib.nullcontext()

    def current_device(self) -> int:
        """The number of the current GPU; on the CPU this process's number on its machine."""
        return torch.cuda.current_device() if self._is_gpu else local_rank(os.environ) or 0

    def current_device_name(self) -> str:
        """``cuda:0`` or ``cpu``."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one."""
        if self._is_gpu:
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Whether there is a device."""
        return True

    def device_count(self) -> int:
        """Number of GPUs; on the CPU the number of processes of this machine."""
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1")
        return torch.cuda.device_count() if self._is_gpu else int(here)

    def communication_backend_name(self) -> str:
        """``nccl`` or ``gloo``."""
        return "nccl" if self._is_gpu else "gloo"

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when they return."""
        return not self._is_gpu

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A tensor in pinned host memory, from which copies to a GPU are fast."""
        return tensor.pin_memory() if self._is_gpu else tensor

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory."""
        if self._is_gpu:
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory that are free."""
        return torch.cuda.mem_get_info(device_index)[0] if self._is_gpu else available_memory()

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return torch.cuda.is_bf16_supported() if self._is_gpu else True

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Number formats of models."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices."""
        torch.manual_seed(seed)

    def random(self) -> Any:
        """torch's module of random numbers."""
        return torch.random


@functools.cache
def get_accelerator() -> Accelerator:
    """This machine's device."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """Whether DeepSpeed knows this machine's device: it does."""
    return True
