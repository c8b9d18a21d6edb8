"""Allocates the model's parameters: this process's shards, and the whole units that layers compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gptpar.engine.data_axes import DataAxes
from gptpar.engine.units import Unit
from gptpar.system.pinned import PinnedMemory


class ParameterMemory:
    """Owns the memory of the model's parameters.

    Under ZeRO-3, or where the shards live in host memory, a whole unit is on the device only while a layer needs it.
    Otherwise the whole unit stays on the device, and the shard is a view of it.

    Args:
        units: in forward order.
        dtype: of units that declare none.
        on_host: whether the shards live in host memory.

    Attributes:
        units: by name.
        full: unit -> [length] the unit's parameters on the device; without storage while a transient unit is freed.
        shards: unit -> [shard_length] this process's shard.
        transient: whether whole units exist only while a layer needs them.
        everything: [sum of lengths] all units in a row, if they are not transient and have one dtype; else empty.
    """

    def __init__(
        self, units: Sequence[Unit], data: DataAxes, dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ):
        self.units = {unit.name: unit for unit in units}
        self.transient, self.on_host = data.zero_stage == 3 or on_host, on_host
        self._place, self._dtype, self._device = data.place, dtype, device
        self.full: dict[str, torch.Tensor] = {}
        self.shards: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._pinned: list[PinnedMemory] = []
        self.everything = torch.empty(0, dtype=dtype, device=device)
        # The stream of copies from host memory to the device.
        self.stream = torch.cuda.Stream(device) if on_host and device.type == "cuda" else None
        if self.transient:
            self._place_shards(units)
        else:
            self._place_whole(units)

    def _place_shards(self, units: Sequence[Unit]) -> None:
        for unit in units:  # one after the other: together they may not fit
            full = self.full[unit.name] = torch.empty(unit.length, dtype=self._dtype_of(unit), device=self._device)
            self._views |= unit.views(full)
            self.free(unit.name)
        for dtype, alike in self._by_dtype(units).items():
            lengths = {unit.name: unit.shard_length for unit in alike}
            if self.on_host:
                self.shards |= self._on_host(lengths, dtype, self._device)
            else:
                self.shards |= {name: torch.zeros(n, dtype=dtype, device=self._device) for name, n in lengths.items()}

    def _place_whole(self, units: Sequence[Unit]) -> None:
        by_dtype = self._by_dtype(units)
        for dtype, alike in by_dtype.items():
            row = torch.zeros(sum(unit.length for unit in alike), dtype=dtype, device=self._device)
            if len(by_dtype) == 1:
                self.everything = row
            for unit, piece in zip(alike, row.split([unit.length for unit in alike]), strict=True):
                self.full[unit.name] = piece
                self.shards[unit.name] = piece.split(unit.shard_length)[self._place.shard(unit)]
                self._views |= unit.views(piece)

    def _dtype_of(self, unit: Unit) -> torch.dtype:
        return unit.dtype or self._dtype

    def _by_dtype(self, units: Sequence[Unit]) -> dict[torch.dtype, list[Unit]]:
        found: dict[torch.dtype, list[Unit]] = {}
        for unit in units:
            found.setdefault(self._dtype_of(unit), []).append(unit)
        return found

    def _on_host(self, lengths: dict[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Zeros in host memory, one vector for each name, in one allocation."""
        num_bytes = sum(lengths.values()) * dtype.itemsize
        if device.type == "cuda":
            self._pinned.append(PinnedMemory(num_bytes))
            memory = self._pinned[-1].data
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return dict(zip(lengths, memory.view(dtype).split(list(lengths.values())), strict=True))

    def views(self) -> dict[str, torch.Tensor]:
        """Each parameter's view of the device's memory, by global name; without storage while its unit is freed."""
        return dict(self._views)

    def allocate(self, unit: str) -> None:
        """Give a transient unit its memory on the device, without values."""
        storage, num_bytes = self.full[unit].untyped_storage(), self.full[unit].nbytes
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)

    def free(self, unit: str) -> None:
        """Give up a transient unit's memory on the device."""
        storage = self.full[unit].untyped_storage()
        if storage.resizable():  # it is not while a numpy array shares the memory
            storage.resize_(0)

    def in_use(self) -> int:
        """Bytes of the device that this process's tensors fill; 0 on a CPU, where freed units save nothing."""
        if self._device.type != "cuda":
            return 0
        found: int = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"]
        return found  # memory_allocated() would sort all statistics first

    @torch.no_grad()
    def fill(self, unit: Unit, values: Mapping[str, torch.Tensor]) -> None:
        """Set the values of a unit that no optimizer updates.

        Args:
            values: parameter's name -> its values, for all parameters of the unit.
        """
        if self.transient:
            self.allocate(unit.name)
        for name, value in values.items():
            unit.params[name].view(self.full[unit.name]).copy_(value)
        if self.transient:
            low = self._place.shard(unit) * unit.shard_length
            self.shards[unit.name].copy_(self.full[unit.name][low : low + unit.shard_length])
            self.free(unit.name)

    def copy_from(self, master_weights: Mapping[str, torch.Tensor]) -> None:
        """Round master weights to the model parameters in the shards.

        Args:
            master_weights: unit -> master weights of the first elements of its shard; a subscriber writes the others.
        """
        targets = [self.shards[unit][: len(values)] for unit, values in master_weights.items()]
        if self.stream is None:
            if targets:
                torch._foreach_copy_(targets, list(master_weights.values()))
            return
        for target, values in zip(targets, master_weights.values(), strict=True):
            target.copy_(values.to(target.dtype), non_blocking=True)
