"""Page-locked host memory, which a GPU can read and write while the CPU does other work, and copies from and to it."""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch

from gptpar.errors import GptparError
from gptpar.system import pages


class PinnedMemory:
    """Page-locked memory of exactly the requested size; torch's own allocator rounds up to powers of two.

    Its pages hold nothing else, because no page can be locked twice.

    Attributes:
        data: [num_bytes], uint8, zeros; locked as long as this object lives.

    Raises:
        GptparError: the system does not allow that much locked memory.
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

        # Memory must be unlocked before it is freed: the next owner of the same addresses could not lock them.
        self._unlock = weakref.finalize(self, _unlock, self.data.data_ptr())
        self._unlock.atexit = False

    def close(self) -> None:
        """Unlock the memory; no transfer may be under way. It is unlocked as well when this object is deleted."""
        if self._unlock is not None:
            self._unlock()


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class _AsDeviceMemory:
    def __init__(self, tensor: torch.Tensor):
        place = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = place


def as_device_memory(pinned: torch.Tensor) -> torch.Tensor:
    """A view on the GPU of a contiguous tensor in page-locked memory, for kernels to write to.

    The memory must outlive it.
    """
    seen: torch.Tensor = torch.as_tensor(_AsDeviceMemory(pinned), device="cuda")
    return seen.view(pinned.dtype).view(pinned.shape)


def begin_copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Put a copy between page-locked memory and the GPU into a stream; both tensors must live until it is done.

    Unlike torch's ``copy_`` it keeps Python's lock. A thread that gives the lock away beside another one that launches
    kernels waits for it again, and interrupts the other one to get it.

    Args:
        target, source: contiguous, of the same dtype and length.
        stream: a stream of the current device, which this thread has used before.

    Raises:
        GptparError: the driver refuses the copy.
    """
    assert target.dtype == source.dtype and target.shape == source.shape
    assert target.is_contiguous() and source.is_contiguous()
    driver = _driver()
    status = driver.cuMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)
    if status != 0:
        raise GptparError(f"the GPU's driver refused a copy of {source.nbytes:,} bytes (CUDA error {status}).")


def let_follow(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Let later work of a stream wait for an event, which may be unused; unlike torch's it keeps Python's lock.

    Raises:
        GptparError: the driver refuses.
    """
    if handle := event.cuda_event:
        status = _driver().cuStreamWaitEvent(stream.cuda_stream, handle, 0)
        if status != 0:
            raise GptparError(f"the GPU's driver refused to let a stream wait for an event (CUDA error {status}).")


def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Record an event in a stream; unlike torch's it keeps Python's lock, but for an event's first time.

    Raises:
        GptparError: the driver refuses.
    """
    if handle := event.cuda_event:
        status = _driver().cuEventRecord(handle, stream.cuda_stream)
        if status != 0:
            raise GptparError(f"the GPU's driver refused to record an event (CUDA error {status}).")
    else:
        event.record(stream)


def waitable_event() -> torch.cuda.Event:
    """An event for which a thread sleeps in the driver; torch's default would keep a processor core busy."""
    return torch.cuda.Event(blocking=True)


def current_stream() -> torch.cuda.Stream:
    """``torch.cuda.current_stream()`` without a new object at each call."""
    return _stream(*torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


@functools.cache
def _driver() -> ctypes.PyDLL:
    driver = ctypes.PyDLL("libcuda.so.1")  # loaded by torch already
    driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    driver.cuStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    return driver
