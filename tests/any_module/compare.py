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
    for kind, mine, theirs in (
        ("loss", _named(got.losses), _named(wanted.losses)),
        ("norm", _named(got.norms), _named(wanted.norms)),
        ("gradient", got.gradients, wanted.gradients),
        ("weight", got.weights, wanted.weights),
        ("buffer", [got.buffers], [wanted.buffers]),
    ):
        assert len(mine) == len(theirs), f"{len(mine)} steps against {len(theirs)}"
        for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            for name in one | other:
                yield kind, Deviation(_relative(one.get(name), other.get(name)), step, name)


def _named(numbers: list[float]) -> list[Named]:
    return [{"": torch.tensor(number, dtype=torch.float64)} for number in numbers]


def _relative(got: Tensor | None, wanted: Tensor | None) -> float:
    if got is None or wanted is None or got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0
    difference = (got.double() - wanted.double()).abs().max().item()
    largest = wanted.double().abs().max().item()
    return difference / largest if largest and difference < float("inf") else float("inf")
