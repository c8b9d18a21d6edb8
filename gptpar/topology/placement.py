"""Declares a parameter's placement: how its value is split, and over which axes its gradient is summed.

A layer declares each of its own parameters in an attribute ``declared``:

    self.declared = {"weight": ParameterSpec(Normal(0.02), axis.split(0, width), SAME)}

Everything else (initial values, sums of gradients, norms, checkpoints, memory planning) follows from this, through the
parameter table (:mod:`gptpar.engine.table`).

A module with buffers has a method ``reset_buffers()``, which gives its own buffers their initial values: layers are
built without memory, and get it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from gptpar.topology.initial_values import Init
from gptpar.topology.layout import TENSOR

AXES = frozenset({TENSOR})
"""Axes that a layer declares. Every gradient is summed over the data axis; layers do not declare that."""


@dataclass(frozen=True)
class Split:
    """Each tensor-parallel rank has a range of one dimension.

    Attributes:
        dim: the dimension that is split.
        full: its length in the whole tensor.
        start: where this rank's range begins.
        longest: length of the longest range of any rank; those of the vocabulary may differ.
    """

    dim: int
    full: int
    start: int
    longest: int


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank has the whole parameter."""


@dataclass(frozen=True)
class Same:
    """Autograd leaves on each rank the complete gradient of the values that this rank has."""


@dataclass(frozen=True)
class Sum:
    """Autograd leaves an addend on each rank; the gradient is the sum of the addends over these axes.

    This holds wherever ranks apply the same values to different data: their own tokens, or their own heads.

    Raises:
        ValueError: there is no such axis.
    """

    axes: frozenset[str]

    def __post_init__(self) -> None:
        if unknown := self.axes - AXES:
            raise ValueError(f"gradients are summed over the axes {sorted(AXES)}, not over {sorted(unknown)}")


REPLICATED = Replicated()
SAME = Same()

Value = Split | Replicated
Gradient = Same | Sum


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer declares of one of its parameters; all three are needed.

    Attributes:
        init: its initial value.
        value: which part of it each rank has.
        gradient: what autograd leaves of its gradient on each rank.
    """

    init: Init | None = None
    value: Value | None = None
    gradient: Gradient | None = None

    @property
    def split(self) -> Split | None:
        """How it is split; ``None`` if every rank has the whole parameter."""
        return self.value if isinstance(self.value, Split) else None

    @property
    def grad_sums(self) -> frozenset[str]:
        """The axes over which the gradient is summed."""
        return self.gradient.axes if isinstance(self.gradient, Sum) else frozenset()

    def problems(self) -> Iterator[str]:
        """Each missing or contradictory declaration, with what to write instead."""
        if self.init is None:
            yield "its initial value is missing: write init=Normal(std) or init=Constant(value)"
        if self.value is None:
            yield "its value's placement is missing: write value=axis.split(dim, length) or value=REPLICATED"
        if self.gradient is None:
            yield (
                'its gradient\'s placement is missing: write gradient=Sum(frozenset({"tensor"})) where each '
                "tensor-parallel rank applies it to tokens or heads of its own, else gradient=SAME"
            )
        if self.split is not None and TENSOR in self.grad_sums:
            yield "it is split over the tensor axis, so that ranks have different elements: write gradient=SAME"


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
                    f'write self.declared = {{"{local}": ParameterSpec(init, value, gradient), ...}} in its constructor'
                    " (gptpar/topology/placement.py says what these are)"
                ]
            owner = f"layer {name!r}: {type(module).__name__} does not declare its parameter {inner!r}"
            problems += [f"{owner}: {problem}" for problem in wrong]
    if problems:
        raise TypeError("\n".join(problems))
    return found
