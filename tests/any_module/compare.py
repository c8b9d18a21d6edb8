"""The deviation of one trace from another: the worst of each kind, and where."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.any_module.reference import Named, Trace

KINDS = ("loss", "norm", "gradient", "weight", "buffer")


@dataclass(frozen=True, order=True)
class Deviation:
    """Attributes: ``size``: relative to the largest magnitude of the tensor of that name; infinite where it is missing,
    of another shape or not finite."""

    size: float = 0.0
    step: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.size:.1e}" + (f" ({self.name}, step {self.step + 1})" if self.size and self.name else "")


Deviations = dict[str, Deviation]


def deviations(got: Trace, wanted: Trace) -> Deviations:
    """The worst of each kind."""
    worst = dict.fromkeys(KINDS, Deviation())
    for kind, deviation in _all(got, wanted):
        worst[kind] = max(worst[kind], deviation)
    return worst


def problems(found: Deviations, tolerance: float) -> str:
    """The kinds that deviate by more, as text."""
    return "; ".join(f"{kind} deviates by {one}" for kind, one in found.items() if not one.size <= tolerance)


def _all(got: Trace, wanted: Trace) -> Iterator[tuple[str, Deviation]]:
    for kind, mine, theirs in (("loss", got.losses, wanted.losses), ("norm", got.norms, wanted.norms)):
        for step, pair in enumerate(_pairs(mine, theirs)):
            yield kind, Deviation(_relative(*map(_tensor, pair)), step)
    for kind, named, references in (
        ("gradient", got.gradients, wanted.gradients),
        ("weight", got.weights, wanted.weights),
        ("buffer", [got.buffers], [wanted.buffers]),
    ):
        for step, (one, other) in enumerate(_pairs(named, references)):
            yield from ((kind, Deviation(size, step, name)) for name, size in _of_names(one, other))


def _pairs(mine: list, theirs: list) -> Iterator[tuple]:
    assert len(mine) == len(theirs), f"{len(mine)} steps against {len(theirs)}"
    return zip(mine, theirs, strict=True)


def _of_names(got: Named, wanted: Named) -> Iterator[tuple[str, float]]:
    for name in [*wanted, *(name for name in got if name not in wanted)]:
        yield name, _relative(got[name], wanted[name]) if name in got and name in wanted else float("inf")


def _tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _relative(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    difference = (got.double() - wanted.double()).abs().max().item()
    largest = wanted.double().abs().max().item()
    if difference == 0:
        return 0.0
    return difference / largest if largest and difference < float("inf") else float("inf")
