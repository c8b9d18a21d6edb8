"""Decides which process orthogonalizes which matrices, and which elements go there. Pure.

ZeRO shards cut matrices anywhere, and tensor-parallel ranks split them. So the processes that share a unit's matrices
exchange them: each parameter has one home among these processes, which gets all of its elements, and sends each process
the directions of its own elements back. Every process derives the same homes from its own table: parameters are taken
longest first, each by the process with the least work so far.

Where no axis divides a matrix, each process has it whole and does it alone, and all of them compute the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Param, Unit
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.update import Update
from gptpar.topology.mesh import Mesh, rows_of
from gptpar.topology.placement import ParameterInfo, range_of

CHUNK_ELEMENTS = 1 << 26
"""A chunk takes a further unit up to this many elements, and beyond them if it has fewer units than processes."""


@dataclass(frozen=True)
class MatrixPart:
    """A process's elements of one parameter.

    Attributes:
        member: the process, as its position in the group that exchanges.
        info: the process's part of the parameter, without the axes that count matrices.
        first, stop: the elements' positions in this part, in memory order.
    """

    member: int
    info: ParameterInfo
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class MatrixJob:
    """One parameter, whose matrices one process orthogonalizes.

    Attributes:
        unit: the parameter's.
        shape: of all matrices that the processes share.
        home: the process, as its position in the group.
        pieces: what is assembled there.
        is_duplicated: other processes of the group hold the same matrices and orthogonalize them, too. Such a job joins
            no batch, because the batch size could change bits.
    """

    unit: Unit
    param: Param
    shape: torch.Size
    home: int
    pieces: tuple[MatrixPart, ...]
    is_duplicated: bool


@dataclass(frozen=True)
class MatrixChunk:
    """Units whose matrices are assembled at the same time, to use all processes and to bound the memory.

    Attributes:
        axes: over which processes exchange elements.
        size: number of these processes.
        me: this process's position among them.
        jobs: of all of them.
    """

    units: tuple[Unit, ...]
    axes: tuple[str, ...]
    size: int
    me: int
    jobs: tuple[MatrixJob, ...]

    def sent(self) -> Iterator[tuple[int, MatrixJob, MatrixPart]]:
        """(receiver, job, this process's piece), by receiver."""
        for home in range(self.size):
            for job in self.jobs:
                if job.home == home:
                    yield from ((home, job, piece) for piece in job.pieces if piece.member == self.me)

    def received(self) -> Iterator[tuple[int, MatrixJob, MatrixPart]]:
        """(sender, job of this process, piece), by sender; each sender has the jobs in the same order."""
        for member in range(self.size):
            for job in self.jobs:
                if job.home == self.me:
                    yield from ((member, job, piece) for piece in job.pieces if piece.member == member)


def chunks_of(table: ParameterTable, updates: Sequence[Update]) -> list[MatrixChunk]:
    """The chunks of this process's units, in forward order; only units with matrices are in one.

    Args:
        updates: by group.
    """
    with_matrices = [(unit, _axes(unit, table.place, updates)) for unit in table.units if _matrices(unit, updates)]
    runs: list[tuple[list[Unit], tuple[str, ...], int]] = []
    for unit, axes in with_matrices:
        length = sum(param.info.shape.numel() for param in _matrices(unit, updates))
        if runs and runs[-1][1] == axes:
            units, _, elements = runs[-1]
            size = len(members_of(table.place.mesh, table.place.rank, axes))
            if len(units) < size or elements + length <= CHUNK_ELEMENTS:
                runs[-1] = [*units, unit], axes, elements + length
                continue
        runs.append(([unit], axes, length))
    return [_chunk(units, axes, table, updates) for units, axes, _ in runs]


def members_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from ``rank`` by their positions on some axes alone, in ascending order."""
    return next(ranks for ranks in mesh.groups(*axes) if rank in ranks) if axes else [rank]


def _matrices(unit: Unit, updates: Sequence[Update]) -> list[Param]:
    """The parameters that are updated by matrix; empty ones have none."""
    return [p for p in unit.params.values() if isinstance(updates[p.group], MatrixUpdate) and p.info.full_shape.numel()]


def _dividing(info: ParameterInfo, update: MatrixUpdate) -> tuple[str, ...]:
    """The axes that split the matrices of a parameter; others may split the dims that count matrices."""
    matrices, num_dims = update.matrices(info.matrices), len(info.shape)
    return tuple(axis for axis, split in info.placement.value.items() if matrices.divides(split.dim, num_dims))


def _axes_of(unit: Unit, param: Param, place: Place, updates: Sequence[Update]) -> tuple[str, ...]:
    """The axes over which a parameter's matrices are divided."""
    update = updates[param.group]
    assert isinstance(update, MatrixUpdate)
    return place.mesh.divided((*place.sharded_over(unit.copies_over), *_dividing(param.info, update)))


def _axes(unit: Unit, place: Place, updates: Sequence[Update]) -> tuple[str, ...]:
    """The axes over which the processes exchange a unit's elements."""
    return place.mesh.divided(axis for p in _matrices(unit, updates) for axis in _axes_of(unit, p, place, updates))


def _chunk(
    units: Sequence[Unit], axes: tuple[str, ...], table: ParameterTable, updates: Sequence[Update]
) -> MatrixChunk:
    place = table.place
    members = members_of(place.mesh, place.rank, axes)
    jobs: list[MatrixJob] = []
    choices: list[tuple[float, list[int]]] = []
    for unit in units:
        for param in _matrices(unit, updates):
            update, own = updates[param.group], _axes_of(unit, param, place, updates)
            assert isinstance(update, MatrixUpdate)
            for rank in members:
                sharing = members_of(place.mesh, rank, own)
                if sharing[0] != rank:
                    continue  # processes that share a parameter have one job
                pieces = [_piece(unit, param, replace(place, rank=r), own, members.index(r)) for r in sharing]
                shape = _over(param.info, own).full_shape
                is_duplicated = own != axes or unit.name in table.ties
                held = tuple(p for p in pieces if p.first < p.stop)
                jobs.append(MatrixJob(unit, param, shape, 0, held, is_duplicated))
                sizes = update.matrices(param.info.matrices).shapes(shape)
                cost = sum(count * update.flops(rows, columns) for count, rows, columns in sizes)
                choices.append((cost, [piece.member for piece in pieces]))
    homes = _homes(choices, len(members))
    placed = tuple(replace(job, home=home) for job, home in zip(jobs, homes, strict=True))
    return MatrixChunk(tuple(units), axes, len(members), members.index(place.rank), placed)


def _homes(choices: Sequence[tuple[float, Sequence[int]]], size: int) -> list[int]:
    """The home of each job: the longest first, each where least is to be done.

    Args:
        choices: (cost, processes that may have it) of each job.
        size: number of processes.
    """
    loads, homes = [0.0] * size, [0] * len(choices)
    for number in sorted(range(len(choices)), key=lambda job: (-choices[job][0], job)):
        cost, among = choices[number]
        homes[number] = min(among, key=lambda member: (loads[member], member))
        loads[homes[number]] += cost
    return homes


def _over(info: ParameterInfo, axes: Sequence[str]) -> ParameterInfo:
    """A process's part as if other axes did not split the parameter."""
    value = {axis: split for axis, split in info.placement.value.items() if set(rows_of((axis,))) & set(axes)}
    return replace(info, placement=replace(info.placement, value=value))


def _piece(unit: Unit, param: Param, place: Place, axes: Sequence[str], member: int) -> MatrixPart:
    """The part of a parameter that a process has.

    Args:
        place: the process's.
        axes: over which it shares the parameter.
    """
    info = _over(param.info, axes)
    sizes, value = list(info.shape), dict(info.placement.value)
    for axis, split in value.items():
        start, stop = range_of(place.position(axis), place.mesh.size(axis), split.full)
        sizes[split.dim], value[axis] = stop - start, replace(split, start=start)
    info = replace(info, shape=torch.Size(sizes), placement=replace(info.placement, value=value))
    low, stop = place.shard(unit) * unit.shard_length - param.start, info.shape.numel()
    first = max(0, low)
    return MatrixPart(member, info, first, max(first, min(stop, low + unit.shard_length)))
