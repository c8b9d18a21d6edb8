"""The parameter table says for each element of a process who owns it, where it is updated, and what is summed. Pure.

One picture: parameter -> ranges -> owner -> update. A unit is a layer's parameters in one flat buffer. The processes
that hold copies of a unit divide it into equal shards. The twin-flow ratio divides each shard: the device updates the
first elements, the host updates the others. The results are ranges: contiguous elements of one parameter that are all
treated alike. All code that has to know where an element is asks the table. A table needs no other process: any process
can make any rank's table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import torch

from gptpar.engine.ranges import Home, Place, Range, device_lengths, extents, merged
from gptpar.engine.units import GroupOf, Param, Unit, common_copies, group_by_decay
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition
from gptpar.pipeline.stage import BufferInfo
from gptpar.topology.mesh import PIPELINE, TENSOR
from gptpar.topology.placement import ParameterInfo
from gptpar.topology.tensor_parts import TensorParts, views_of_flat


@dataclass(frozen=True)
class Tie:
    """Several pipeline stages have copies of a unit: their gradients are summed, and one copy is counted.

    Attributes:
        stages: in rising order.
    """

    unit: str
    stages: tuple[int, ...]


class ParameterTable:
    """All parameters of one process.

    Args:
        units: in forward order.
        place: the process's position on the axes.
        ratio: the twin-flow ratio: which fraction of the elements the host updates, 0 to 1.
        tied: unit -> the stages that have a copy of it, for units of several stages.
        buffers: of the layers, by global name.

    Attributes:
        units: in forward order.
        params: by global name, in the units' order.
        ties: unit -> its tie, for units that other stages have a copy of.
        buffers: as given.
        on_device: unit -> number of elements at the beginning of its shard that the device updates.
        may_offload: whether the host updates some elements on this process or, of the same units, on another one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        place: Place = Place(),  # noqa: B008
        *,
        ratio: float = 0.0,
        tied: Mapping[str, Sequence[int]] | None = None,
        buffers: Mapping[str, BufferInfo] | None = None,
    ):
        self.place, self.buffers, self.may_offload = place, dict(buffers or {}), ratio > 0
        self.units = tuple(units)
        self._unit_of = {unit.name: unit for unit in units}
        self.params: dict[str, Param] = {name: param for unit in units for name, param in unit.params.items()}
        self.ties = {unit: Tie(unit, tuple(sorted(stages))) for unit, stages in (tied or {}).items() if len(stages) > 1}
        self.on_device, total, offloaded = device_lengths(units, place, ratio, self.ties)
        self._elements = {None: total, Home.DEVICE: total - offloaded, Home.HOST: offloaded}
        whole, here = sum(unit.shard_length for unit in units), sum(self.on_device.values())
        self._lengths = {None: whole, Home.DEVICE: here, Home.HOST: whole - here}

    @staticmethod
    def of(
        infos: Mapping[str, Mapping[str, ParameterInfo]],
        place: Place = Place(),  # noqa: B008
        *,
        ratio: float = 0.0,
        tied: Mapping[str, Sequence[int]] | None = None,
        buffers: Mapping[str, BufferInfo] | None = None,
        group_of: GroupOf = group_by_decay,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> ParameterTable:
        """Lay out a process's units.

        Args:
            infos: unit -> its parameters' declarations by global name, both in forward order.
            dtypes: unit -> number format of its parameters, where it is not the engine's.
        """
        dtype_of = dtypes or {}
        units = [
            Unit.of(name, own, place.shards(common_copies(own)), group_of=group_of, dtype=dtype_of.get(name))
            for name, own in infos.items()
        ]
        return ParameterTable(units, place, ratio=ratio, tied=tied, buffers=buffers)

    def divide_groups(self, group_of: Mapping[str, int]) -> None:
        """Give parameters, by global name, other optimizer groups."""
        for unit in self.units:
            unit.params.update({name: replace(one, group=group_of[name]) for name, one in unit.params.items()})
            self.params.update(unit.params)
        self.__dict__.pop("_ranges", None)

    def summed_on_host(self, ratio: float) -> dict[str, int]:
        """Units whose gradients the host adds up over micro-batches, each with the number of elements.

        A tied unit is never among them: its copies are summed over stages at the end of a step, on the device.

        Args:
            ratio: the share of units, the first among them, spread over the model: so the host's work is spread over
                the backward pass. All processes of a stage choose the same ones; those without elements for the host
                are left out.
        """
        share = Fraction(ratio).limit_denominator(1000)  # 0.07 is a little more than 7 / 100
        units = [unit for unit in self.units if unit.name not in self.ties]
        chosen = (unit for n, unit in enumerate(units) if math.ceil((n + 1) * share) > math.ceil(n * share))
        lengths = {unit.name: unit.shard_length - self.on_device[unit.name] for unit in chosen}
        return {unit: length for unit, length in lengths.items() if length}

    def ranges(self, *, unit: str | None = None, home: Home | None = None) -> Iterator[Range]:
        """This process's ranges, in the order of the units' flat ranges."""
        for name in self._ranges if unit is None else (unit,):
            for one in self._ranges[name]:
                if home in (None, one.home):
                    yield one

    def ranges_on_device(self) -> Iterator[tuple[int, Range]]:
        """The device's ranges, each with its position among the device's elements of all units in a row."""
        base = 0
        for unit, length in self.on_device.items():
            yield from ((base + one.start, one) for one in self.ranges(unit=unit, home=Home.DEVICE))
            base += length

    @cached_property
    def _ranges(self) -> dict[str, tuple[Range, ...]]:
        return {unit.name: tuple(self._ranges_of(unit)) for unit in self.units}

    def ranges_on_host(self, held: Iterable[tuple[str, int, torch.Tensor]]) -> Iterator[tuple[Range, torch.Tensor]]:
        """The host's ranges with their values; one whose values are in several places comes in parts.

        Args:
            held: (unit, first element within its offloaded range, values).
        """
        for unit, at, values in held:
            low, ranges = self.on_device[unit] + at, list(self.ranges(unit=unit, home=Home.HOST))
            found = [part for one in ranges if (part := one.between(low, low + values.numel()))]
            yield from ((one, values[one.start - low : one.stop - low]) for one in found)

    def parts(
        self, values: Iterable[tuple[Range, torch.Tensor]], dtype: torch.dtype, also: Iterable[str] = ()
    ) -> dict[str, TensorParts]:
        """The parts of global parameters that ranges cover.

        Args:
            values: each range's elements [n]; the parts are views of them, or copies if they have another ``dtype``.
            also: names that the result has even if there is no range of them.
        """
        found: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {name: [] for name in also}
        for one, elements in list(values):
            info, ends = self.params[one.param].info, (one.first, one.first + one.length)
            parts = views_of_flat(info.shape, info.offsets, *ends, elements.to(dtype), info.memory_order)
            found.setdefault(one.param, []).extend(parts)
        shapes = {name: self.params[name].info.full_shape for name in found}
        return {name: TensorParts(shapes[name], tuple(held), dtype) for name, held in found.items()}

    def views(self, one: Range, values: torch.Tensor) -> tuple[tuple[tuple[int, ...], torch.Tensor], ...]:
        """The parts (:class:`TensorParts`) of the global parameter that a range covers: views of its values [n]."""
        return self.parts([(one, values)], values.dtype)[one.param].parts

    def group_ranges(self, unit: str) -> list[GroupRange]:
        """Ranges of one optimizer group in this process's shard of a unit, padding between parameters included."""
        return [GroupRange(*one) for one in merged((a, b, param.group) for a, b, param in self._extents(unit))]

    def device_group_ranges(self) -> list[GroupRange]:
        """Ranges of one optimizer group among the device's elements of all units in a row."""
        return [GroupRange(*one) for one in merged((a, b, param.group) for a, b, param in self._on_device())]

    def counted(self, unit: str) -> list[tuple[int, int]]:
        """(start, stop) in the shard of elements that this process counts in sums over the model, padding included."""
        return _only_true(merged((a, b, param.name in self._counted) for a, b, param in self._extents(unit)))

    def device_counted(self) -> list[tuple[int, int]]:
        """(start, stop) of counted elements (:meth:`counted`) among the device's elements of all units in a row."""
        return _only_true(merged((a, b, param.name in self._counted) for a, b, param in self._on_device()))

    def messages(self, unit: str, axis: str) -> list[tuple[int, int]]:
        """(start, stop) in the shard of gradients to be summed over an axis; all of the axis's ranks have the same."""
        pieces = ((a, b, axis in param.info.placement.gradient_sum) for a, b, param in self._extents(unit))
        return _only_true(merged(pieces))

    def offloaded(self) -> list[OffloadedPartition]:
        """The host's partition of each unit, in forward order; units that the device updates wholly have none."""
        found = []
        for unit in self.units:
            low, high = self.on_device[unit.name], unit.shard_length
            if low < high:
                group_ranges, counted = tuple(self.group_ranges(unit.name)), tuple(self.counted(unit.name))
                found.append(OffloadedPartition(unit.name, high, group_ranges, counted).between(low, high))
        return found

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Unit -> its view of a vector [length(Home.DEVICE)] of the device's elements of all units in a row."""
        return dict(zip(self.on_device, vector.split(list(self.on_device.values())), strict=True))

    def elements(self, home: Home | None = None) -> int:
        """Number of this process's elements without padding; an uneven tensor-parallel split counts as the longest."""
        return self._elements[home]

    def length(self, home: Home | None = None) -> int:
        """Number of this process's elements with padding: the length of buffers for its shards."""
        return self._lengths[home]

    @property
    def ratio(self) -> float:
        """The fraction of elements that the host updates: the requested ratio, rounded to whole elements."""
        total = self._elements[None]
        return self._elements[Home.HOST] / total if total else 0.0

    def _ranges_of(self, unit: Unit) -> Iterator[Range]:
        low, cut = self.place.shard(unit) * unit.shard_length, self.on_device[unit.name]
        for a, b, param in self._extents(unit.name):
            start, stop = a, min(b, param.stop - low)
            for home, first, last in ((Home.DEVICE, start, min(stop, cut)), (Home.HOST, max(start, cut), stop)):
                if first < last:
                    at, counted = low + first - param.start, param.name in self._counted
                    yield Range(unit.name, param.name, first, last, at, home, param.group, counted)

    def _extents(self, unit: str) -> Iterator[tuple[int, int, Param]]:
        return extents(self._unit_of[unit], self.place.shard(self._unit_of[unit]))

    def _on_device(self) -> Iterator[tuple[int, int, Param]]:
        """(start, stop, parameter) among the device's elements of all units in a row."""
        base = 0
        for unit, length in self.on_device.items():
            for start, stop, param in self._extents(unit):
                if start < length:
                    yield base + start, base + min(stop, length), param
            base += length

    @cached_property
    def _counted(self) -> set[str]:
        """Names of the parameters whose elements this process counts in sums over the model."""
        return {name for unit in self.units for name, param in unit.params.items() if self._counts(unit, param)}

    def _counts(self, unit: Unit, param: Param) -> bool:
        tie = self.ties.get(unit.name)
        first_stage = tie is None or self.place.position(PIPELINE) == tie.stages[0]
        return first_stage and self.place.is_first(unit) and (self.place.position(TENSOR) == 0 or not param.replicated)


def _only_true(pieces: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop, chosen in pieces if chosen]
