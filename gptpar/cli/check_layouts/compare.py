"""Compares trainings with the reference, within tolerances: a row for each, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gptpar.cli.check_layouts.outcome import Outcome, Tensors

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Tolerance of relative differences: in fp64 of any element, in the other formats of all elements together (L2)."""


ROUND_OFF = 64 * torch.finfo(torch.float64).eps
"""Largest difference of a gradient by rounding, as a fraction of the largest gradient."""


class Comparison:
    """Compares outcomes with the reference and remembers the largest differences.

    Args:
        number_format: decides what is compared, and the tolerance.
        steps: number of steps that are compared.
        reference: name of the reference, for the verdict.
        speaks: whether this process compares and prints.
        resumes: whether there may be one more step, after a resume.
    """

    def __init__(self, number_format: str, steps: int, reference: str, *, speaks: bool, resumes: bool = True):
        self.tolerance, self._speaks = TOLERANCES[number_format], speaks
        self._measure = difference if number_format == "fp64" else overall_difference
        self.num_failed = self._num_cases = self._num_resumed = 0
        self._largest, self._round_off = 0.0, set[str]()
        self._steps, self._reference, self._resumes = steps, reference, resumes
        if speaks:
            columns = ["initial", "loss", "gradient", "weights", *["resumed"] * resumes]
            print(" ".join(f"{name:>9}" for name in columns) + "  combination", flush=True)

    def compare(self, name: str, outcome: Outcome, alone: Outcome) -> None:
        """Print a case's row; ``resumed`` covers loss, gradients and weights of the step after a resume."""
        if not self._speaks:
            return
        steps = self._steps
        columns = [
            self._measure([(outcome.initial, alone.initial)]),
            step_difference(outcome.steps[:steps], alone.steps[:steps]),
            self._measure(zip(outcome.gradients[:steps], alone.gradients[:steps], strict=True)),
            self._measure(zip(outcome.weights[:steps], alone.weights[:steps], strict=True)),
        ]
        resumed = None
        if len(outcome.steps) > steps:
            pairs = [(outcome.gradients[-1], alone.gradients[-1]), (outcome.weights[-1], alone.weights[-1])]
            resumed = max(self._measure(pairs), step_difference(outcome.steps[-1:], alone.steps[-1:]), key=_nan_last)
        values = [*columns, *([] if resumed is None else [resumed])]
        largest = max(values, key=_nan_last)
        failed = not largest <= self.tolerance
        self._largest = max(self._largest, largest, key=_nan_last)
        self._num_cases += 1
        self._num_resumed += resumed is not None
        self.num_failed += failed
        self._round_off.update(name for one in alone.gradients[:steps] for name in round_off(one))
        row = " ".join(f"{value:9.1e}" for value in values) + " " * 10 * (self._resumes and resumed is None)
        print(f"{row}  {name}{'  DIFFERS' if failed else ''}", flush=True)

    def sum_up(self) -> None:
        """The last line."""
        if not self._speaks:
            return
        if self.num_failed:
            verdict = f"{self.num_failed} of {self._num_cases} combinations differ from {self._reference}"
        else:
            one = self._num_cases == 1
            who = "the combination computes" if one else f"all {self._num_cases} combinations compute"
            verdict = f"{who} the same as {self._reference}"
        resumes = ", a save and a resume in another layout" if self._num_resumed else ""
        print(
            f"{verdict}: largest relative difference {self._largest:.1e} over {self._steps} steps{resumes} "
            f"(tolerance {self.tolerance:.0e})",
            flush=True,
        )
        if self.num_failed and self._round_off:
            print(
                f"The gradient of {len(self._round_off)} parameters, such as {min(self._round_off)}, has elements that "
                "are zero by construction and consist of round-off: Lion makes whole steps of them, and AdamW with a "
                "tiny --adam-eps, in other directions in each layout.",
                flush=True,
            )


def round_off(gradients: Tensors) -> list[str]:
    """Names of the tensors in fp64 with elements, such as key biases, below the round-off of the largest of all."""
    bound = ROUND_OFF * max(map(_largest, gradients.values()), default=0.0)
    wide = {name: tensor.abs() for name, tensor in gradients.items() if tensor.dtype == torch.float64}
    return [name for name, sizes in wide.items() if ((sizes > 0) & (sizes < bound)).any()]


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _relative(error: float, size: float) -> float:
    """A relative difference; it is 0 for equal numbers, even if both are 0."""
    if error == 0:
        return 0.0
    return error / size if size else float("inf")


def difference(pairs: Iterable[tuple[Tensors, Tensors]]) -> float:
    """Largest difference of any element, relative to its tensor's largest, or to a thousandth of the largest of all.

    The floor is for gradients that consist of round-off alone, such as that of a key's bias.
    """
    worst = 0.0
    for found, wanted in pairs:
        if found.keys() != wanted.keys():
            return float("nan")
        floor = max((_largest(tensor) for tensor in wanted.values()), default=0.0) / 1000
        for name, tensor in wanted.items():
            error = _relative(_largest(found[name] - tensor), max(_largest(tensor), floor))
            worst = max(worst, error, key=_nan_last)
    return worst


def overall_difference(pairs: Iterable[tuple[Tensors, Tensors]]) -> float:
    """L2 norm of the difference of all elements together, relative to the norm of the reference.

    It is for all formats but fp64. In these, single elements are noise, because AdamW makes a whole step of a gradient
    that is round-off alone.
    """
    worst = 0.0
    for found, wanted in pairs:
        if found.keys() != wanted.keys():
            return float("nan")
        error = sum(float((found[name] - tensor).double().square().sum()) for name, tensor in wanted.items())
        norm = sum(float(tensor.double().square().sum()) for tensor in wanted.values())
        worst = max(worst, _relative(error, norm) ** 0.5, key=_nan_last)
    return worst


def step_difference(found: Sequence[tuple[float, ...]], wanted: Sequence[tuple[float, ...]]) -> float:
    """Largest relative difference of losses, gradient norms and auxiliary losses."""
    pairs = [(a, b) for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True)]
    return max((_relative(abs(a - b), abs(b)) for a, b in pairs), key=_nan_last)
