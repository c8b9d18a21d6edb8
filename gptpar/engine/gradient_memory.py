"""Allocates the gradient sums: each unit's sum over micro-batches, and this process's shard of the reduced sum."""

from __future__ import annotations

import torch

from gptpar.engine.data_axes import DataAxes
from gptpar.engine.ranges import Home
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit


class GradientMemory:
    """Owns the memory of gradient sums.

    Under ZeRO-0 and 1 a unit's whole sum is kept until the step's last backward pass. Under ZeRO-2 and 3, and with sums
    on the host, the whole sum of a unit that several processes hold lives for one micro-batch, and only this process's
    shard of the sum over micro-batches stays. A unit with offloaded elements gets a buffer for its whole sum when a
    step needs one; a step of one micro-batch frees it after use.

    Args:
        table: of this process's parameters.
        dtype: of sums, fp32 or wider; where nothing is ever added, that of the gradients is enough.
        arriving_dtype: of the gradients that autograd produces.
        ahead: see the attribute.
        host_sums: the share of units whose gradients the subscriber adds up over micro-batches.

    Attributes:
        table, data: as given.
        ahead: whether temporary sums get their memory at the beginning of a step. A recorded step needs this: its
            allocator would otherwise give a sum's memory to later kernels before the subscriber has fetched the sum.
        shard: the final gradient of the elements that the device's optimizer updates: all units' in a row.
        shards: the same by unit.
        kept_whole: names of units whose whole sum is kept over micro-batches; each micro-batch's sum of the others is
            reduced to shards, which are added up.
        summed_on_host: names of units whose gradients the subscriber adds up over micro-batches, of its own elements.
        single: whether the step has one micro-batch.
        undivided: units that the device's optimizer updates wholly.
    """

    def __init__(
        self,
        table: ParameterTable,
        data: DataAxes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        arriving_dtype: torch.dtype | None = None,
        ahead: bool = False,
        host_sums: float = 0.0,
    ):
        self.table, self.data, self._device = table, data, device
        self._arriving_dtype = arriving_dtype or dtype
        self._keeps_sharded, self.single, self.ahead = data.zero_stage < 2 and not host_sums, True, ahead
        self.undivided = [unit for unit in table.units if table.on_device[unit.name] == unit.shard_length]
        names = {unit.name for unit in self.undivided}
        self._divided = {unit.name: unit for unit in table.units if unit.name not in names}
        self.summed_on_host = frozenset(table.summed_on_host(host_sums))
        whole = [unit.name for unit in table.units if self._keeps_sharded or unit.shards == 1]
        self.kept_whole = frozenset(whole) - self.summed_on_host
        self.allocate(dtype)

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate new memory for sums of this dtype, between two steps."""
        self._dtype = dtype
        self.shard = torch.zeros(self.table.length(Home.DEVICE), dtype=dtype, device=self._device)
        self.shards = self.table.split(self.shard)
        sharded = [unit for unit in self.undivided if unit.shards > 1]
        self._sums = {unit.name: self.shards[unit.name] for unit in self.undivided if unit.shards == 1}
        if self._keeps_sharded and sharded:
            whole = torch.zeros(sum(unit.length for unit in sharded), dtype=dtype, device=self._device)
            pieces = whole.split([unit.length for unit in sharded])
            self._sums |= {unit.name: piece for unit, piece in zip(sharded, pieces, strict=True)}
        self._fixed = frozenset(self._sums)
        self._views: dict[str, dict[str, torch.Tensor]] = {}
        self._shard_sums: dict[str, torch.Tensor] = {}

    @property
    def keeps_all(self) -> bool:
        """Whether no unit is reduced before the step's last backward pass."""
        return len(self.kept_whole) == len(self.table.units)

    def begin(self, num_micro_batches: int) -> None:
        """Begin a step."""
        self.single = num_micro_batches == 1
        for unit in self.table.units:  # a step that ended in an error may have left sums in another format
            total = self._sums.get(unit.name)
            if total is not None and unit.name not in self._fixed and total.dtype != self.dtype_of(unit):
                del self._sums[unit.name]
        for unit in self._divided.values() if self.ahead else ():
            self.sum_of(unit)

    def dtype_of(self, unit: Unit) -> torch.dtype:
        """The dtype of a temporary sum: that of the gradient if nothing will be added to it."""
        if self.data.groups.get(unit.copies_over) is not None or not (self.single or unit.name in self.summed_on_host):
            return self._dtype
        return self.arriving_dtype(unit)

    def arriving_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype of the gradients that autograd produces for a unit's parameters."""
        return unit.dtype or self._arriving_dtype

    def is_narrow(self, unit: Unit) -> bool:
        """Whether a unit's sum on the device always has the number format of the gradients that autograd produces."""
        is_alone = self.data.groups.get(unit.copies_over) is None
        return self._dtype == self.arriving_dtype(unit) or (is_alone and unit.name in self.summed_on_host)

    def sum_of(self, unit: Unit) -> torch.Tensor:
        """[unit.length] the sum of this process's gradients; its padding is zero."""
        if unit.name not in self._sums:
            # In a sum for one micro-batch only the padding is zeroed: the collector writes or zeroes the rest. Memory
            # taken ahead is not zeroed either: the subscriber may still read the last step's gradient there.
            is_kept = not self.ahead and not self.single and unit.name in self.kept_whole
            new = torch.zeros if is_kept else torch.empty
            total = new(unit.length, dtype=self.dtype_of(unit), device=self.shard.device)
            for start, stop in () if is_kept else unit.padding:
                total[start:stop].zero_()
            self._sums[unit.name] = total
        return self._sums[unit.name]

    def views_of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Each parameter's view of :meth:`sum_of`; those of permanent memory are made once."""
        views = self._views.get(unit.name)
        if views is None:
            views = unit.views(self.sum_of(unit))
            if unit.name in self._fixed:
                self._views[unit.name] = views
        return views

    def take(self, unit: Unit) -> torch.Tensor:
        """:meth:`sum_of`, to be reduced: the receiver alone keeps memory that is not permanent."""
        total = self.sum_of(unit)
        if unit.name not in self._fixed and (self.single or unit.name not in self.kept_whole):
            del self._sums[unit.name]
        return total

    def shard_sum_of(self, unit: Unit) -> torch.Tensor:
        """[shard_length] this process's shard of the sum over micro-batches, under ZeRO-2 and 3."""
        if self.shards[unit.name].numel() == unit.shard_length:
            return self.shards[unit.name]
        if unit.name not in self._shard_sums:
            self._shard_sums[unit.name] = torch.empty(unit.shard_length, dtype=self._dtype, device=self.shard.device)
        return self._shard_sums[unit.name]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors in use; some may be views of the same memory."""
        return [self.shard, *self._sums.values(), *self._shard_sums.values()]
