"""Saved activations in host memory: they leave and return on a stream of their own, beside the computation.

A block's saved tensors leave while the next block runs; the input of a block that is computed again leaves while the
block itself runs. They return one block before they are needed: when the backward pass takes a block's first tensor,
those of the block before it begin to return. The newest block's tensors are still on the device when the backward pass
begins with it.

A tensor is copied with its storage, once for all views of it, and returns with the same strides at the same offset. So
the backward pass launches the same kernels, and computes the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gptpar.system.pinned import PinnedMemory

Block = TypeVar("Block")

MIN_BYTES = 1024
"""Smaller tensors stay on the device: a copy would take longer than it is worth."""


def offloaded_blocks(blocks: Sequence[Block], count: int) -> frozenset[Block]:
    """The blocks whose activations leave: ``count`` of all, evenly spread, so that copies have the time of all blocks.

    The last block stays if any does: its backward pass begins first.

    Args:
        blocks: the model's, in forward order.
    """
    total = len(blocks)
    places = (place for place in range(total) if (place + 1) * count // total > place * count // total)
    return frozenset(blocks[total - 1 - place] for place in places)


class HostActivations:
    """Host copies of saved tensors, in buffers that are kept and used again; page-locked ones for a GPU.

    The device holds the tensors of two blocks beside those in use, at most: of one block whose tensors leave, or have
    returned early, and of one that runs.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._free: list[Any] = []
        self._leaving: HostBlock | None = None
        self._newest: weakref.ref[HostBlock] | None = None

    def begin_pass(self) -> None:
        """A forward pass begins: its blocks return in reverse order, and say nothing about those of other passes."""
        self._newest = None

    def call(self, layer: nn.Module, x: torch.Tensor, *args: Any) -> Any:
        """``layer(x, *args)``, whose saved tensors leave, except for its parameters, its buffers and ``args``."""
        if not torch.is_grad_enabled():
            return layer(x, *args)
        given = (one for one in args if isinstance(one, torch.Tensor))
        stay = {one.untyped_storage().data_ptr() for one in chain(layer.parameters(), layer.buffers(), given)}
        with self.block() as block:
            pack, unpack = self._hooks
            with saved_tensors_hooks(partial(pack, block, x.device, stay), unpack):
                return layer(x, *args)

    @cached_property
    def _hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Never compiled, although a compiled layer calls them; made late, because that imports torch's compiler."""
        return torch._dynamo.disable(self._pack), torch._dynamo.disable(self._unpack)

    @contextmanager
    def block(self, *, saves_first: bool = False) -> Iterator[HostBlock]:
        """A block runs inside this context; the tensors that it puts return together.

        Args:
            saves_first: whether it puts all of them when it begins, so that their copies can end with it. Otherwise the
                next block's time is theirs, too.
        """
        if saves_first:
            self._release()
        block = HostBlock(self._newest)
        self._newest = weakref.ref(block)
        try:
            yield block
        finally:
            block.storages.clear()  # they refer to the block: after an error, nothing else would free the memory
        if not saves_first:
            self._release()  # bounds the device's memory: one block's tensors leave at a time
        self._leaving = block

    def _release(self) -> None:
        if self._leaving is not None:
            self._leaving.leave()
        self._leaving = None

    def put(self, block: HostBlock, x: torch.Tensor) -> HostTensor:
        """Begin to copy a tensor's storage to the host; nobody may change it before the copy ends."""
        key = x.untyped_storage().data_ptr(), x._version
        if key not in block.storages:
            block.storages[key] = self._begin_to_leave(block, x)
        return HostTensor(block.storages[key], x)

    def take(self, kept: HostTensor) -> torch.Tensor:
        """The tensor on the device, for later work of the current stream; the block before begins to return."""
        block = kept.copy.block
        if kept.copy.on_device is None:
            self._bring(block)
        block.let_follow()
        before = None if block.before is None else block.before()
        if before is not None and not before.has_returned:
            self._bring(before)
        return kept.on_device()

    def _pack(
        self, block: HostBlock, device: torch.device, stay: set[int], x: torch.Tensor
    ) -> torch.Tensor | HostTensor:
        storage = x.untyped_storage()
        if x.device != device or storage.nbytes() < MIN_BYTES or storage.data_ptr() in stay:
            return x if x.is_leaf else x.detach()  # an operator that keeps its own output would live forever
        return self.put(block, x.detach())

    def _unpack(self, kept: torch.Tensor | HostTensor) -> torch.Tensor:
        return self.take(kept) if isinstance(kept, HostTensor) else kept

    def _begin_to_leave(self, block: HostBlock, x: torch.Tensor) -> HostCopy:
        on, storage = torch.get_device_module(x.device), x.untyped_storage()
        if x.device not in self._streams:
            self._streams[x.device] = on.Stream()
        stream = self._streams[x.device]
        copy = HostCopy(block, storage, self._buffer(storage.nbytes(), x.device), self._free)
        block.copies.append(weakref.ref(copy))
        block.stream = on.current_stream()
        stream.wait_stream(block.stream)
        with on.stream(stream):
            copy.host.copy_(_bytes_of(storage), non_blocking=True)
            block.copied = stream.record_event()
        return copy

    @torch.no_grad()
    def _bring(self, block: HostBlock) -> None:
        """Begin to copy a block's tensors to the device, where it does not hold them."""
        block.has_returned = True
        missing = [copy for copy in block.alive() if copy.on_device is None]
        for copy in missing:
            copy.on_device = torch.empty(len(copy.host), dtype=torch.uint8, device=copy.device).untyped_storage()
        if missing:
            on = torch.get_device_module(missing[0].device)
            block.stream = on.current_stream()
            stream = self._streams[missing[0].device]
            stream.wait_stream(block.stream)  # their memory may be in use by work that was queued earlier
            with on.stream(stream):
                for copy in missing:
                    _bytes_of(copy.on_device).copy_(copy.host, non_blocking=True)
                block.copied = stream.record_event()

    def _buffer(self, num_bytes: int, device: torch.device) -> Any:
        """The smallest unused buffer that is large enough, or a new one.

        A buffer is never given up: locking its memory takes long. A new one is twice as large as the unused ones, so
        that tensors whose sizes vary need few of them.
        """
        sizes = [buffer.data.numel() for buffer in self._free]
        enough = [size for size in sizes if size >= num_bytes]
        if enough:
            return self._free.pop(sizes.index(min(enough)))
        size = max(num_bytes, 2 * max(sizes, default=0))
        return PinnedMemory(size) if device.type == "cuda" else torch.empty(size, dtype=torch.uint8)


class HostBlock:
    """The saved tensors of a block for one micro-batch, which return together.

    Args:
        before: the block before it in the same forward pass.

    Attributes:
        storages: (address, version) -> the copy of a storage, while the block runs.
        copies: of its storages; those that are gone are not needed any more.
        stream: of the computation.
        copied: the last copy from or to the host has ended.
        has_returned: the tensors were brought back, or have begun to return.
    """

    def __init__(self, before: weakref.ref[HostBlock] | None):
        self.before, self.has_returned = before, False
        self.storages: dict[tuple[int, int], HostCopy] = {}
        self.copies: list[weakref.ref[HostCopy]] = []
        self.stream: Any = None
        self.copied: Any = None

    def alive(self) -> Iterator[HostCopy]:
        """The copies that somebody needs."""
        found = (reference() for reference in self.copies)
        return (copy for copy in found if copy is not None)

    def let_follow(self) -> None:
        """Let later work of the computation's stream wait for the copies."""
        if self.copied is not None:
            self.stream.wait_event(self.copied)

    def leave(self) -> None:
        """Free the device's memory once the copies to the host have ended."""
        self.let_follow()
        for copy in self.alive():
            copy.on_device = None


class HostCopy:
    """The copy of a storage in host memory, until the last tensor in it is gone.

    Args:
        block: whose tensor is in the storage.
        on_device: the storage.
        buffer: memory for the copy.
        free: takes the buffer back. Copies from and to buffers are made on one stream, one after the other.

    Attributes:
        host: the copy, in bytes.
        on_device: the storage while the device holds it.
    """

    def __init__(self, block: HostBlock, on_device: torch.UntypedStorage, buffer: Any, free: list[Any]):
        self.block, self.device, self.host = block, on_device.device, buffer.data[: on_device.nbytes()]
        self.on_device: torch.UntypedStorage | None = on_device
        self._buffer, self._free = buffer, free

    def __del__(self) -> None:
        """The buffer is unused; a copy from or to the device's memory must end before that is used again."""
        self._free.append(self._buffer)
        if self.on_device is not None:
            self.block.let_follow()


class HostTensor:
    """A saved tensor: its place in the copy of its storage."""

    def __init__(self, copy: HostCopy, x: torch.Tensor):
        self.copy, self.dtype, self.shape = copy, x.dtype, x.shape
        self._place = x.storage_offset(), x.shape, x.stride()

    def on_device(self) -> torch.Tensor:
        """The tensor in the device's memory."""
        assert self.copy.on_device is not None
        return torch.empty(0, dtype=self.dtype, device=self.copy.device).set_(self.copy.on_device, *self._place)


def _bytes_of(storage: torch.UntypedStorage | None) -> torch.Tensor:
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
