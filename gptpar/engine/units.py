"""Lays out each layer's parameters in flat buffers, its units, and decides which of them decay. Pure.

A unit is reduced, gathered and released as a whole. The processes that hold copies of it are the same for all of its
parameters, so that a layer with experts has several units. Its padding lets them divide it into equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from gptpar.optim.group_ranges import ALIGNMENT, DECAYS, DECAYS_NOT, is_matrix
from gptpar.topology.mesh import COPIES, TENSOR
from gptpar.topology.placement import ParameterInfo

GroupOf = Callable[[str, ParameterInfo], int]
"""(global name, declaration) -> number of the parameter's optimizer group."""


def group_by_decay(name: str, info: ParameterInfo) -> int:
    """A GPT's group without overrides, judged on the full shape."""
    return DECAYS if is_matrix(name, len(info.full_shape)) else DECAYS_NOT


@dataclass(frozen=True)
class Param:
    """One parameter of a unit: ``unit[start:stop]`` with the declared shape and strides.

    Attributes:
        name: its global name.
        info: its layer's declaration: shape, placement of value and gradient, initial values.
        group: number of its optimizer group.
        start, stop: position of its elements in the unit.
        end: start of the next parameter. It is the same on every tensor-parallel rank, even if splits are uneven.
        longest: number of elements of the longest tensor-parallel split.
    """

    name: str
    info: ParameterInfo
    group: int
    start: int
    stop: int
    end: int
    longest: int

    @property
    def shape(self) -> torch.Size:
        """Shape of this rank's split."""
        return self.info.shape

    @property
    def replicated(self) -> bool:
        """Whether the tensor axis leaves the parameter whole; the expert axis may split it."""
        return TENSOR not in self.info.placement.value

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's view of a buffer of its unit's length."""
        values = buffer[self.start : self.stop]
        if self.info.strides is None:
            return values.view(self.shape)
        return values.as_strided(self.shape, self.info.strides)


@dataclass(frozen=True)
class Unit:
    """A layer's parameters in one flat buffer, or those of them that the same processes have copies of.

    Attributes:
        name: the layer's, with a suffix where the layer has several units.
        params: global name -> parameter.
        length: elements with padding, a multiple of ``shards * ALIGNMENT``; 0 without parameters.
        shards: number of equal shards, over the processes that hold copies of the unit.
        copies_over: the rows of the mesh of these processes, which read different tokens: its gradient is summed there.
        dtype: of the model's parameters; ``None``: the engine's. All master weights and states have one wide dtype.
    """

    name: str
    params: dict[str, Param]
    length: int
    shards: int
    copies_over: tuple[str, ...] = COPIES
    dtype: torch.dtype | None = None

    @staticmethod
    def of(
        name: str,
        parameters: Mapping[str, ParameterInfo],
        shards: int,
        *,
        group_of: GroupOf = group_by_decay,
        dtype: torch.dtype | None = None,
    ) -> Unit:
        """Lay out a layer; parameters that are treated alike lie next to each other.

        Args:
            parameters: global name -> declaration, in forward order.
            group_of: says each parameter's optimizer group; default: a GPT's.
            dtype: of the model's parameters; ``None``: the engine's.
        """
        groups = {name: group_of(name, info) for name, info in parameters.items()}

        def kind(parameter: str) -> tuple[list[str], list[str], int]:
            placement = parameters[parameter].placement
            return sorted(placement.value), sorted(placement.gradient_sum), groups[parameter]

        params: dict[str, Param] = {}
        start = 0
        for parameter in sorted(parameters, key=kind):
            info = parameters[parameter]
            longest = info.longest_shape.numel()
            end = _round_up(start + longest, ALIGNMENT)
            stop = start + info.shape.numel()
            params[parameter] = Param(parameter, info, groups[parameter], start, stop, end, longest)
            start = end
        used = max(start, 1) if params else 0  # a unit of empty parameters has shards, too
        return Unit(name, params, _round_up(used, shards * ALIGNMENT), shards, common_copies(parameters), dtype)

    @cached_property
    def shard_length(self) -> int:
        """Elements of one shard."""
        return self.length // self.shards

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the elements that are padding."""
        ends = [0, *(param.stop for param in self.params.values())]
        starts = [*(param.start for param in self.params.values()), self.length]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's view of a buffer of the unit's length.

        One call of torch makes all of them: each call gives Python's lock to other threads, and waits to get it back.
        """
        pieces: list[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(buffer, self._pieces)
        views = dict(zip(self.params, pieces[::2], strict=True))
        for name in self._own_strides:
            views[name] = self.params[name].view(buffer)
        return views

    @cached_property
    def _own_strides(self) -> list[str]:
        """The parameters that torch does not lay out as usual, and empty ones."""
        return [name for name, one in self.params.items() if one.info.strides is not None or not one.shape.numel()]

    @cached_property
    def _pieces(self) -> list[torch.Tensor]:
        """Tensors without memory, two for each parameter: one of its shape, one of the padding after it."""
        params = list(self.params.values())
        starts = [param.start for param in params[1:]] + [self.length]
        shapes = [
            shape
            for param, start in zip(params, starts, strict=True)
            for shape in (param.shape, torch.Size([start - param.stop]))
        ]
        return [torch.empty(shape, device="meta") for shape in shapes]


def common_copies(parameters: Mapping[str, ParameterInfo]) -> tuple[str, ...]:
    """The axes whose ranks hold copies of a unit with these parameters.

    Raises:
        ValueError: the parameters have copies on different axes, and so cannot be one unit.
    """
    over = {info.placement.copies_over for info in parameters.values()} or {COPIES}
    if len(over) > 1:
        raise ValueError(f"{list(parameters)} have copies over the axes {sorted(over)}: make a unit of each kind")
    return over.pop()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
