"""Inputs of recomputed layers in host memory: they leave and return on a stream of their own, beside the computation.

An input begins to leave when its layers begin to run, so that the copy hides behind them. When the backward pass takes
an input, the one that it will take next begins to return, and its copy hides behind the backward pass of the first. The
newest input is on the device still when the backward pass begins with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gptpar.system.pinned import PinnedMemory


class HostInputs:
    """Host copies of tensors, in page-locked buffers that are kept and used again.

    The device holds two tensors beside those in use, at most: one that leaves, and one that has returned early.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._free: list[PinnedMemory] = []
        self._leaving: HostInput | None = None
        self._newest: weakref.ref[HostInput] | None = None

    def begin_pass(self) -> None:
        """A forward pass begins: its tensors return in reverse order, and say nothing about those of other passes."""
        self._newest = None

    def concerns(self, x: torch.Tensor) -> bool:
        """Whether a tensor is on a device that has memory of its own."""
        return not x.is_cpu

    def put(self, x: torch.Tensor) -> HostInput:
        """Begin to copy a tensor to the host; nobody may change it before the copy ends."""
        on = torch.get_device_module(x.device)
        if self._stream is None:
            self._stream = on.Stream()
        current = on.current_stream()
        if self._leaving is not None:  # bounds the device's memory: one tensor leaves at a time
            self._leaving.stay(current)
            self._leaving.on_device = None
        kept = HostInput(self._buffer(x.nbytes), x, self._free, self._newest)
        self._stream.wait_stream(current)
        with on.stream(self._stream):
            kept.host.copy_(x, non_blocking=True)
            kept.copied = self._stream.record_event()
        self._leaving, self._newest = kept, weakref.ref(kept)
        return kept

    def take(self, kept: HostInput) -> torch.Tensor:
        """The tensor on the device, for later work of the current stream; the one put before it begins to return."""
        if kept.on_device is None:
            self._bring(kept)
        x = kept.on_device
        assert x is not None
        kept.stay(torch.get_device_module(x.device).current_stream())
        kept.on_device, kept.taken = None, True
        if self._leaving is kept:
            self._leaving = None
        before = None if kept.before is None else kept.before()
        if before is not None and before.on_device is None and not before.taken:
            self._bring(before)
        return x

    def _bring(self, kept: HostInput) -> None:
        x = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=kept.device)
        on = torch.get_device_module(x.device)
        self._stream.wait_stream(on.current_stream())  # its memory may be in use by work that was queued earlier
        with on.stream(self._stream):
            x.copy_(kept.host, non_blocking=True)
            kept.on_device, kept.copied = x, self._stream.record_event()

    def _buffer(self, num_bytes: int) -> PinnedMemory:
        """The smallest unused buffer that is large enough, or a new one.

        A buffer is never given up, because a recorded step may use it. A new one is twice as large as the unused ones,
        so that tensors whose sizes vary need few of them.
        """
        sizes = [buffer.data.numel() for buffer in self._free]
        enough = [size for size in sizes if size >= num_bytes]
        if enough:
            return self._free.pop(sizes.index(min(enough)))
        return PinnedMemory(max(num_bytes, 2 * max(sizes, default=0)))


class HostInput:
    """A tensor whose copy is in host memory, until the last reference to it is gone.

    Args:
        buffer: memory for the copy.
        x: the tensor.
        free: takes the buffer back. Copies from and to buffers are made on one stream, one after the other.
        before: the tensor that was put before this one in the same forward pass.

    Attributes:
        host: the copy, of the tensor's shape.
        on_device: the tensor, while the device holds it.
        copied: the last copy from or to the host has ended.
        taken: the backward pass has had it.
    """

    def __init__(
        self,
        buffer: PinnedMemory,
        x: torch.Tensor,
        free: list[PinnedMemory],
        before: weakref.ref[HostInput] | None,
    ):
        self.host = buffer.data[: x.nbytes].view(x.dtype).view(x.shape)
        self.device, self.before, self.taken = x.device, before, False
        self.on_device: torch.Tensor | None = x
        self.copied: Any = None
        self._buffer, self._free = buffer, free

    def stay(self, stream: Any) -> None:
        """Let later work of a stream wait for the copy, after which the device's memory may be used otherwise."""
        if self.copied is not None:
            stream.wait_event(self.copied)

    def __del__(self) -> None:
        """The buffer is unused; a copy to the device that nobody has taken must end before its memory is used again."""
        self._free.append(self._buffer)
        if self.on_device is not None:
            self.stay(torch.get_device_module(self.device).current_stream())
