"""``deepspeed.runtime.pipe.topology``: grids of processes by the names and sizes of their axes, and their groups."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch.distributed as dist

from gptpar.deepspeed.names import FACTS
from gptpar.errors import ConfigError
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA

_ANSWERS = {name: attribute for attribute, names in FACTS["grid"].items() for name in names.split()}
"""Function of a grid -> the attribute that it returns."""


class ProcessTopology:
    """A grid of ranks; the last axis is the one along which ranks are neighbours.

    Args:
        axes: names, such as ``["pipe", "data"]``.
        dims: number of processes on each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        self.axes, self.dims = list(axes), list(dims)
        coordinates: Any = namedtuple  # a checker of types cannot know the fields
        self.ProcessCoord = coordinates("ProcessCoord", list(axes))
        places = product(*(range(dim) for dim in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place, of which every axis is named.

        Raises:
            ValueError: an axis is missing, or there is no such place.
        """
        if set(coordinates) != set(self.axes):
            raise ValueError(f"get_rank() needs a coordinate of each of the axes {self.axes}, not {coordinates}.")
        place = self.ProcessCoord(**coordinates)
        if place not in self.mapping:
            raise ValueError(f"{place} is outside of the sizes {self.dims}.")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """The names of the axes."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's place as a text such as ``model_00``, without some axes."""
        place = self.get_coord(rank)
        return outer_sep.join(f"{a}{inner_sep}{getattr(place, a):02d}" for a in self.axes if a not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """Number of processes on an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """A rank's place, whose attributes are the axes.

        Raises:
            ValueError: there is no such rank.
        """
        for place, number in self.mapping.items():
            if number == rank:
                return place
        raise ValueError(f"there is no rank {rank} among {self.world_size()}.")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """For each line of processes along an axis, their ranks in order."""
        if axis not in self.axes:
            return []
        lines: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            others = tuple(value for name, value in zip(self.axes, place, strict=True) if name != axis)
            lines.setdefault(others, []).append(rank)
        return list(lines.values())

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks whose places have these coordinates."""
        wanted = coordinates.items()
        return [rank for place, rank in self.mapping.items() if all(getattr(place, a) == at for a, at in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one position of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of processes."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A pipeline whose stages have data-parallel neighbours: ranks of one stage follow each other."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same with a tensor axis, whose ranks are the nearest neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This process's place in a grid with the axes ``pipe``, ``data`` and perhaps ``model``, and its groups there.

    All processes make it together, because they make the groups together.

    Args:
        topology: the grid; default: two axes of sizes that are near each other.
        process_group: without effect: the grid is of all processes.
        known: has groups of the same grid already.

    Attributes:
        data_parallel_size, pipe_parallel_size, model_parallel_size: sizes of the axes.
        stage_id, data_parallel_id: this process's place.
        dp_group, pp_group, slice_group: ranks of the groups of this process along the three axes.
        dp_groups, pipe_groups: ranks of all groups along two of them.
        p2p_groups: for each rank, it and that of the next stage; the first stage follows the last.
        rank_in_model, model_world_size: number among the processes that have one model together, and of these.
        slice_parallel_id: this process's number on the axis ``model``.

    Raises:
        ConfigError: the grid has another number of processes.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, known: Topology | None = None
    ):
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology or PipeDataParallelTopology(*_two_factors(self.world_size))
        if self._topo.world_size() != self.world_size:
            sizes = f"{self._topo.world_size()} processes, and there are {self.world_size}"
            raise ConfigError([f"the topology has {sizes}: let them agree."])
        data, pipe, model = (max(1, self._topo.get_dim(axis)) for axis in ("data", "pipe", "model"))
        self.data_parallel_size, self.pipe_parallel_size, self.model_parallel_size = data, pipe, model
        self.slice_parallel_size = self.model_parallel_size
        place = self._topo.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = getattr(place, "pipe", 0), getattr(place, "data", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        each = [[rank] for rank in range(self.world_size)]
        self.dp_groups, self.pipe_groups, slices = (
            self._topo.get_axis_comm_lists(axis) or each for axis in ("data", "pipe", "model")
        )
        neighbours = (zip(line, line[1:] + line[:1], strict=True) for line in self.pipe_groups)
        self.p2p_groups = sorted([rank, following] for line in neighbours for rank, following in line)
        models = [self._topo.get_axis_list("data", at) for at in range(self._topo.get_dim("data"))] or self.pipe_groups
        self.dp_group, self.dp_proc_group = self._mine(self.dp_groups, None if known is None else known.group(DATA))
        self.pp_group, self.pp_proc_group = self._mine(self.pipe_groups)
        self.slice_group, self.slice_proc_group = self._mine(slices)
        whole = self.pp_proc_group if self.model_parallel_size == 1 else None
        model_ranks, self.ds_model_proc_group = self._mine(models, whole)
        self.rank_in_model, self.model_world_size = model_ranks.index(self.global_rank), len(model_ranks)
        self.slice_parallel_id = self.slice_group.index(self.global_rank)

    def _mine(self, lines: Sequence[Sequence[int]], known: Any = None) -> tuple[list[int], Any]:
        """(ranks, group) of this process's line; all processes make all groups, unless one is known."""
        ranks = next(sorted(line) for line in lines if self.global_rank in line)
        if known is not None:
            return ranks, known
        if len(ranks) == self.world_size:
            return ranks, dist.group.WORLD
        if len(ranks) == 1:
            return ranks, dist.new_group(ranks, use_local_synchronization=True)
        groups = [dist.new_group(sorted(line)) for line in lines]
        return ranks, next(group for group, line in zip(groups, lines, strict=True) if self.global_rank in line)

    def topology(self) -> ProcessTopology:
        """The grid."""
        return self._topo

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """The rank at another stage, and otherwise at this process's place."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **coordinates)
        return self._topo.get_rank(**place._asdict())

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """The functions of DeepSpeed's and Megatron's grids that return one of the attributes (``deepspeed.toml``)."""
        if name not in _ANSWERS:
            raise AttributeError(f"a grid has no {name!r} in gptpar")
        return lambda: getattr(self, _ANSWERS[name])


def _prime_factors(number: int) -> list[int]:
    """A whole number's prime factors in rising order.

    Raises:
        ValueError: the number is not positive.
    """
    if number <= 0:
        raise ValueError(f"{number} has no prime factors: give a number above 0.")
    factors, prime = [], 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            factors.append(prime)
            number //= prime
    return factors


def _two_factors(number: int) -> tuple[int, int]:
    """Two factors of a number: its prime factors in rising order go to one and the other in turn."""
    factors = _prime_factors(number)
    return math.prod(factors[::2]), math.prod(factors[1::2])
