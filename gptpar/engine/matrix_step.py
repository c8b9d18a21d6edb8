"""``MatrixStep``: updates parameters whose update treats matrices as a whole (Muon), wherever their elements are.

For one chunk of units after the other (:mod:`gptpar.engine.matrix_homes`):

1. each element's momentum is updated where the element lives, on the device or at the subscriber; the Nesterov momentum
   (without Nesterov: the momentum) is rounded once to the number format of the exchange;
2. the processes that share the units' matrices send each other these elements, so that each matrix is whole on one;
3. this process orthogonalizes its matrices, in batches that depend on the units and shapes alone;
4. the directions go back the same way, and each element's weight follows where the element lives.

So the ZeRO stage changes results by rounding at most, and the twin-flow ratio changes no bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gptpar.engine.matrix_homes import MatrixChunk, MatrixJob, MatrixPart, chunks_of
from gptpar.engine.ranges import Home
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.optim.elementwise import DeviceStep, UpdateVectors
from gptpar.optim.group_ranges import Family
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.state_layout import CompactVector, StateLayout
from gptpar.optim.torch_kernels import MatrixDeviceStep
from gptpar.optim.update import Update
from gptpar.system.state_guard import StateGuard
from gptpar.topology.tensor_parts import box_view, views_of_flat

AHEAD = 1
"""Chunks whose momenta the subscriber computes while this process orthogonalizes another one."""


@dataclass(frozen=True)
class MatrixExchange:
    """The groups and the number format with which a matrix step moves elements between processes.

    Attributes:
        groups: axes -> this process's group on them.
        dtype: of what is exchanged and orthogonalized; ``None``: that of the master weights.
    """

    groups: Mapping[tuple[str, ...], dist.ProcessGroup | None]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _OnDevice:
    """A range of the device's matrix elements.

    Attributes:
        family: number of its family of groups.
        start, stop: position in the unit's shard.
        at: position among the device's elements of all units in a row.
        decays: whether it is in the family's first group.
        parameters: the model parameters to write; ``None``: they are the master weights, or copied later.
    """

    family: int
    start: int
    stop: int
    at: int
    decays: bool
    parameters: Tensor | None


class MatrixStep:
    """The steps of a process's matrices.

    Args:
        vectors, layout: the device's master weights and states, as :class:`~gptpar.engine.flat_optimizer.FlatState`
            has them.
        parameters: unit -> the model parameters of its elements on the device.
        host: updates the elements that are not the device's.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        families: Sequence[Family],
        table: ParameterTable,
        vectors: Mapping[str, Tensor],
        layout: StateLayout,
        exchange: MatrixExchange,
        guard: StateGuard,
        host: Subscriber | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ):
        self._updates, self._vectors, self._layout = updates, vectors, layout
        self._exchange, self._guard, self._host = exchange, guard, host
        self._place, self._chunks = table.place, chunks_of(table, updates)
        self._on_device = table.on_device
        by_matrix = {group for group, update in enumerate(updates) if isinstance(update, MatrixUpdate)}
        self._compact = {
            unit.name: CompactVector(table.group_ranges(unit.name), by_matrix, unit.shard_length)
            for chunk in self._chunks
            for unit in chunk.units
        }
        self._ranges: dict[str, list[_OnDevice]] = defaultdict(list)
        families_of = {group: (number, family) for number, family in enumerate(families) for group in family}
        for at, one in table.ranges_on_device():
            if one.group in by_matrix:
                number, family = families_of[one.group]
                low = None if parameters is None else parameters[one.unit][one.start : one.stop]
                self._ranges[one.unit].append(_OnDevice(number, one.start, one.stop, at, one.group == family[0], low))
        offloaded = {one.unit for one in table.ranges(home=Home.HOST) if one.group in by_matrix}
        self._offloaded = offloaded if host is not None else set()

    @torch.no_grad()
    def step(self, steps: Sequence[DeviceStep], grad: Tensor) -> None:
        """Take a step, whose numbers are on the device; the subscriber has been asked for it.

        Args:
            steps: of each family.
            grad: the gradient of the device's elements of all units in a row.
        """
        coming: list[dict[str, Tensor]] = []
        for number, chunk in enumerate(self._chunks):
            while len(coming) < min(number + AHEAD + 1, len(self._chunks)):
                coming.append(self._expect(self._chunks[len(coming)]))
            buffers, coming[number] = coming[number], {}
            for unit in chunk.units:
                self._average(unit, buffers[unit.name], steps, grad)
            self._replace_by_directions(chunk, buffers)
            for unit in chunk.units:
                self._follow(unit, buffers[unit.name], steps)

    def _expect(self, chunk: MatrixChunk) -> dict[str, Tensor]:
        """Unit -> memory for its momenta, then its directions; the subscriber writes its elements as soon as it can."""
        weights, found = self._vectors["weights"], {}
        for unit in chunk.units:
            length = self._compact[unit.name].length
            found[unit.name] = weights.new_zeros(length, dtype=self._exchange.dtype or weights.dtype)
            if unit.name in self._offloaded:
                assert self._host is not None
                self._host.expect_momenta(unit.name, partial(self._offloaded_view, unit.name, found[unit.name]))
        return found

    def _offloaded_view(self, unit: str, buffer: Tensor, start: int, stop: int) -> Tensor:
        """The part of a unit's buffer that has the elements ``start:stop`` of its offloaded range."""
        low = self._on_device[unit]
        return self._compact[unit].view(buffer, low + start, low + stop)

    def _average(self, unit: Unit, buffer: Tensor, steps: Sequence[DeviceStep], grad: Tensor) -> None:
        for one in self._ranges[unit.name]:
            step, stop = steps[one.family], one.at + one.stop - one.start
            assert isinstance(step, MatrixDeviceStep)
            (state,) = step.matrix_update.states
            momentum = self._layout.view(state, self._vectors[state], one.at, stop)
            self._guard.before_write([momentum])
            step.average(momentum, grad[one.at : stop], self._compact[unit.name].view(buffer, one.start, one.stop))
        if unit.name in self._offloaded:
            assert self._host is not None
            self._host.wait_for_momenta(unit.name)

    def _follow(self, unit: Unit, buffer: Tensor, steps: Sequence[DeviceStep]) -> None:
        if unit.name in self._offloaded:
            assert self._host is not None
            self._host.submit_directions(unit.name, partial(self._offloaded_view, unit.name, buffer))
        for one in self._ranges[unit.name]:
            weights = self._vectors["weights"][one.at : one.at + one.stop - one.start]
            self._guard.before_write([weights])
            directions = self._compact[unit.name].view(buffer, one.start, one.stop)
            ranges = ((0, len(weights), one.decays),)
            steps[one.family].update(UpdateVectors((weights, directions), one.parameters, ranges))

    def _replace_by_directions(self, chunk: MatrixChunk, buffers: Mapping[str, Tensor]) -> None:
        """Orthogonalize a chunk's momenta: the directions take their place in the buffers."""
        sent = list(chunk.sent())
        mine = [self._elements(job, piece, buffers) for _, job, piece in sent]
        if chunk.size == 1:
            self._orthogonalize([(job, piece, part) for (_, job, piece), part in zip(sent, mine, strict=True)])
            return
        received = list(chunk.received())
        lengths = [piece.stop - piece.first for _, _, piece in received]
        there, here = ([0] * chunk.size for _ in range(2))
        for home, _, piece in sent:
            there[home] += piece.stop - piece.first
        for member, _, piece in received:
            here[member] += piece.stop - piece.first
        outgoing, group = torch.cat(mine), self._exchange.groups[chunk.axes]
        incoming = outgoing.new_empty(sum(here))
        dist.all_to_all_single(incoming, outgoing, here, there, group=group)
        parts = incoming.split(lengths)
        self._orthogonalize([(job, piece, part) for (_, job, piece), part in zip(received, parts, strict=True)])
        dist.all_to_all_single(outgoing, incoming, there, here, group=group)
        torch._foreach_copy_(mine, list(outgoing.split([len(part) for part in mine])))

    def _elements(self, job: MatrixJob, piece: MatrixPart, buffers: Mapping[str, Tensor]) -> Tensor:
        """This process's piece of a parameter in its unit's buffer."""
        low = job.param.start - self._place.shard(job.unit) * job.unit.shard_length
        compact = self._compact[job.unit.name]
        return compact.view(buffers[job.unit.name], low + piece.first, low + piece.stop)

    def _orthogonalize(self, pieces: Sequence[tuple[MatrixJob, MatrixPart, Tensor]]) -> None:
        """Orthogonalize the matrices of this process's jobs, in the memory of their pieces."""
        parts_of: dict[MatrixJob, list[tuple[MatrixPart, Tensor]]] = defaultdict(list)
        for job, piece, part in pieces:
            parts_of[job].append((piece, part))
        whole = {job: _assembled(job, parts) for job, parts in parts_of.items()}
        for key, found in self._batches(whole).items():
            inputs = [batch for _, batch in found]
            outputs = key.update.orthogonalize(torch.cat(inputs) if inputs[1:] else inputs[0])
            for (view, _), output in zip(found, outputs.split([len(batch) for batch in inputs]), strict=True):
                view.copy_(output.view(view.shape))
        for job, parts in parts_of.items():
            if parts[1:]:  # else the whole parameter has the memory of its only piece
                for box, values in _boxes(job, whole[job], parts):
                    values.copy_(box)

    def _batches(self, whole: Mapping[MatrixJob, Tensor]) -> dict[_Batch, list[tuple[Tensor, Tensor]]]:
        """Batch -> (elements in the whole parameter, the same as matrices [number, rows, columns])."""
        found: dict[_Batch, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for job, full in whole.items():
            update = self._updates[job.param.group]
            assert isinstance(update, MatrixUpdate)
            matrices = update.matrices(job.param.info.matrices)
            for view, batch in zip(matrices.views(full), matrices.split(full), strict=True):
                own = job.param.name if job.is_duplicated else ""
                found[_Batch(update, batch.shape[1:], own)].append((view, batch))
        return found


class _Batch(NamedTuple):
    """Matrices that are orthogonalized together.

    Attributes:
        shape: of one.
        alone: the parameter's name if its matrices are a batch by themselves.
    """

    update: MatrixUpdate
    shape: torch.Size
    alone: str


def _assembled(job: MatrixJob, parts: Sequence[tuple[MatrixPart, Tensor]]) -> Tensor:
    """A whole parameter; it has the memory of its only piece, if there is one."""
    (piece, part), *others = parts
    if not others:
        ((_, values),) = views_of_flat(
            piece.info.shape, piece.info.offsets, 0, len(part), part, piece.info.memory_order
        )
        return values
    full = part.new_empty(job.shape)
    for box, values in _boxes(job, full, parts):
        box.copy_(values)
    return full


def _boxes(job: MatrixJob, full: Tensor, parts: Sequence[tuple[MatrixPart, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """(part of the whole parameter, the same elements in a piece's memory)"""
    origin = (0,) * len(job.shape)
    for piece, part in parts:
        info, ends = piece.info, (piece.first, piece.stop)
        for offsets, values in views_of_flat(info.shape, info.offsets, *ends, part, info.memory_order):
            yield box_view(full, (offsets, tuple(values.shape)), origin), values
