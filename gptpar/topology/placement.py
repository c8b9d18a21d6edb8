"""Declares a parameter's placement: which axes split its value, and over which axes its gradient is summed.

A layer declares each of its own parameters in an attribute ``declared``:

    self.declared = {"weight": ParameterSpec(Normal(0.02), axis.split(0, width))}

Everything else (initial values, sums of gradients, norms, checkpoints, memory planning) follows from this, through the
parameter table (:mod:`gptpar.engine.table`).

A module with buffers has a method ``reset_buffers()``, which gives its own buffers their initial values: layers are
built without memory, and get it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from gptpar.topology.initial_values import Init
from gptpar.topology.matrices import WHOLE, Matrices
from gptpar.topology.mesh import EXPERT, TENSOR, copies_over

SPLIT_OVER = (TENSOR, EXPERT)
"""Axes that may split a parameter's value."""
SUMMED_OVER = (TENSOR,)
"""Axes over which a layer may declare sums of gradients. Gradients are summed over the ranks that hold copies and read
different samples without being declared."""


def range_of(position: int, size: int, length: int) -> tuple[int, int]:
    """The range [start, stop) of ``length`` rows at a position of an axis; the ranges' lengths differ by at most one.

    Args:
        size: number of ranks on the axis.
    """
    return position * length // size, (position + 1) * length // size


@dataclass(frozen=True)
class Split:
    """A tensor that is split along one dimension: each rank of an axis has a range of it.

    Attributes:
        dim: the dimension that is split.
        full: its length in the whole tensor.
        start: first index of this rank's range.
        longest: length of the longest range of any rank; ranges of the vocabulary may differ in length.
    """

    dim: int
    full: int
    start: int
    longest: int


@dataclass(frozen=True)
class Placement:
    """Which part of a parameter a rank has, and what autograd leaves of its gradient there.

    Attributes:
        value: axis -> how it splits the parameter; along other axes, ranks have the same values.
        gradient_sum: the axes on which autograd leaves an addend on each rank, to be summed. That is so wherever ranks
            apply the same values to different data: their own tokens, or their own heads. Along other axes, autograd
            leaves the complete gradient of the values that the rank has.

    Raises:
        ValueError: there is no such axis, two axes split one dimension, or an axis splits the value and sums its
            gradient.
    """

    value: Mapping[str, Split] = field(default_factory=dict)
    gradient_sum: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.value.keys() - set(SPLIT_OVER)):
            raise ValueError(f"values are split over the axes {list(SPLIT_OVER)}, not over {unknown}")
        if unknown := sorted(self.gradient_sum - set(SUMMED_OVER)):
            raise ValueError(f"gradients are summed over the axes {list(SUMMED_OVER)}, not over {unknown}")
        if both := sorted(self.gradient_sum & self.value.keys()):
            raise ValueError(
                f"the axes {both} split the value, so that ranks have different elements: their gradients are not "
                "summed; leave these axes out of gradient_sum"
            )
        if len({split.dim for split in self.value.values()}) < len(self.value):
            raise ValueError(f"the axes {sorted(self.value)} split the same dimension: let each split its own")

    def __or__(self, other: Placement) -> Placement:
        """The placement on the axes of both."""
        return Placement({**self.value, **other.value}, self.gradient_sum | other.gradient_sum)

    @property
    def copies_over(self) -> tuple[str, ...]:
        """The axes whose ranks hold copies and read different samples (:func:`~gptpar.topology.mesh.copies_over`)."""
        return copies_over(self.value)


REPLICATED = Placement()
"""The placement of a parameter that every rank has whole and applies to the same data: its gradient is complete."""


@dataclass(frozen=True)
class ParameterSpec:
    """A layer's declaration of one of its parameters; initial values and placement are required."""

    init: Init | None = None
    placement: Placement | None = None
    matrices: Matrices = WHOLE

    def problems(self) -> Iterator[str]:
        """Each missing declaration, with what to write instead."""
        if self.init is None:
            yield "its initial value is missing: write init=Normal(std) or init=Constant(value)"
        if self.placement is None:
            yield (
                "its placement is missing: write placement=axis.split(dim, length) where tensor-parallel ranks split "
                "it; axis.between_layers or axis.inside_layers where each applies it to its own tokens or heads; else "
                "REPLICATED"
            )


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter's shape, placement and initialisation.

    Attributes:
        shape: of this rank's part.
        init: how it is initialised.
        placement: which part of the whole parameter this rank has.
        strides: of this rank's part, whose memory is dense; ``None``: row-major.
        matrices: how the whole parameter divides into matrices (:mod:`gptpar.topology.matrices`).

    Raises:
        ValueError: with these strides, the memory has gaps, or two elements at one position.
    """

    shape: torch.Size
    init: Init
    placement: Placement = REPLICATED
    strides: tuple[int, ...] | None = None
    matrices: Matrices = WHOLE

    def __post_init__(self) -> None:
        if self.strides is None or (len(self.strides) == len(self.shape) and self._is_dense(self.strides)):
            return
        raise ValueError(
            f"a parameter {list(self.shape)} with the strides {list(self.strides)} does not fill its memory: give it a "
            "dense copy, as parameter.data.clone() makes one"
        )

    def _is_dense(self, strides: tuple[int, ...]) -> bool:
        expected = 1
        for dim in reversed(self.memory_order):
            if self.shape[dim] != 1 and strides[dim] != expected:
                return not self.shape.numel()
            expected *= self.shape[dim]
        return True

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """The dims in the order of their strides, the largest stride first."""
        dims = range(len(self.shape))
        return tuple(dims if self.strides is None else sorted(dims, key=self.strides.__getitem__, reverse=True))

    @cached_property
    def full_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        sizes = list(self.shape)
        for split in self.placement.value.values():
            sizes[split.dim] = split.full
        return torch.Size(sizes)

    @property
    def longest_shape(self) -> torch.Size:
        """Shape of the longest part of any rank."""
        sizes = list(self.shape)
        for split in self.placement.value.values():
            sizes[split.dim] = split.longest
        return torch.Size(sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of this rank's part in the whole parameter, one number for each dim."""
        starts = {split.dim: split.start for split in self.placement.value.values()}
        return tuple(starts.get(dim, 0) for dim in range(len(self.shape)))


def declared_by(layer: nn.Module, name: str) -> dict[str, ParameterSpec]:
    """Name of the parameter inside the layer -> what the layer, or a module inside it, declares of it.

    Args:
        name: the layer's, for errors.

    Raises:
        TypeError: parameters are not declared, or not completely; it names all of them and says what to write.
    """
    found: dict[str, ParameterSpec] = {}
    problems = []
    for prefix, module in layer.named_modules():
        declared: dict[str, ParameterSpec] = getattr(module, "declared", {})
        for local, _ in module.named_parameters(recurse=False):
            inner = f"{prefix}.{local}" if prefix else local
            spec = found[inner] = declared.get(local, ParameterSpec())
            wrong = list(spec.problems())
            if local not in declared:
                wrong = [
                    f'write self.declared = {{"{local}": ParameterSpec(init, placement), ...}} in its constructor'
                    " (gptpar/topology/placement.py says what these are)"
                ]
            owner = f"layer {name!r}: {type(module).__name__} does not declare its parameter {inner!r}"
            problems += [f"{owner}: {problem}" for problem in wrong]
    if problems:
        raise TypeError("\n".join(problems))
    return found
