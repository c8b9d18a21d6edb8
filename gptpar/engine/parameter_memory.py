"""The memory of the model's parameters: this process's shards, and the whole units that layers compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gptpar.engine.data_axis import DataAxis
from gptpar.engine.units import Unit
from gptpar.pinned import PinnedMemory


class ParameterMemory:
    """Owns the memory.

    Under ZeRO-3, or where the parameters' home is host memory, a whole unit is on the device only while a layer needs
    it; else always, and a shard is a part of it.

    Args:
        units: in forward order.
        dtype: of the parameters.
        on_host: whether the shards live in host memory.

    Attributes:
        full: unit -> [length] its memory on the device, which need not be there all the time.
        shards: unit -> [shard_length] this process's shard.
        transient: whether whole units come and go.
        everything: [sum of lengths] all units in a row, where they stay.
    """

    def __init__(
        self, units: Sequence[Unit], axis: DataAxis, dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ):
        self.transient, self.on_host = axis.zero_stage == 3 or on_host, on_host
        self.full: dict[str, torch.Tensor] = {}
        self.shards: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self.everything = torch.empty(0, dtype=dtype, device=device)
        # A stream on which shards leave host memory.
        self.stream = torch.cuda.Stream(device) if on_host and device.type == "cuda" else None
        if self.transient:
            for unit in units:  # one after the other: together they may not fit
                full = self.full[unit.name] = torch.empty(unit.length, dtype=dtype, device=device)
                self._views |= unit.views(full)
                self.free(unit.name)
            lengths = {unit.name: unit.shard_length for unit in units}
            if on_host:
                self.shards = self._on_host(lengths, dtype, device)
            else:
                self.shards = {name: torch.zeros(n, dtype=dtype, device=device) for name, n in lengths.items()}
            return
        self.everything = torch.zeros(sum(unit.length for unit in units), dtype=dtype, device=device)
        for unit, piece in zip(units, self.everything.split([unit.length for unit in units]), strict=True):
            self.full[unit.name] = piece
            self.shards[unit.name] = piece.split(unit.shard_length)[axis.shard]
            self._views |= unit.views(piece)

    def _on_host(self, lengths: dict[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Zeros in host memory, one vector for each name, all in one piece."""
        num_bytes = sum(lengths.values()) * dtype.itemsize
        if device.type == "cuda":
            self._pinned = PinnedMemory(num_bytes)
            memory = self._pinned.data
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return dict(zip(lengths, memory.view(dtype).split(list(lengths.values())), strict=True))

    def views(self) -> dict[str, torch.Tensor]:
        """Each parameter's memory on the device, by its global name; it need not be there all the time."""
        return dict(self._views)

    def allocate(self, unit: str) -> None:
        """Give a transient unit its memory on the device, without values."""
        full = self.full[unit]
        full.untyped_storage().resize_(full.numel() * full.element_size())

    def free(self, unit: str) -> None:
        """Give up a transient unit's memory on the device."""
        self.full[unit].untyped_storage().resize_(0)

    def copy_from(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Round master weights to the shards.

        Args:
            masters: unit -> the beginning of this process's shard; a subscriber writes the rest of it.
        """
        targets = [self.shards[unit][: len(values)] for unit, values in masters.items()]
        if self.stream is None:
            torch._foreach_copy_(targets, list(masters.values()))
            return
        for target, values in zip(targets, masters.values(), strict=True):
            target.copy_(values.to(target.dtype), non_blocking=True)
