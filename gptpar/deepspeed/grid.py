"""``deepspeed.runtime.pipe.topology``: grids of processes by the names and sizes of their axes. Pure."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any


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
