"""The arguments of AdamW's CPU kernels, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gptpar.optim.adam_update import AdamHyperparameters, UpdateNumbers, step_numbers
from gptpar.optim.rounded_states import KEPT_IN, key_of

GRAD_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamStep:
    """One group's hyperparameters in one step.

    Attributes:
        step: number of this step, from 1. Bias corrections follow from it, so a resumed run continues bit for bit.
        divisor: of the gradients: loss scale times clip divisor. If it exceeds fp32's range, gradients become zero.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: float
    step: int
    divisor: float = 1.0

    @cached_property
    def numbers(self) -> UpdateNumbers:
        """The numbers of the update of each element; those of a step serve all buckets."""
        how = AdamHyperparameters(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.bias_correction)
        return step_numbers(how, self.step, self.divisor)

    @property
    def key(self) -> int:
        """The key of the step's random numbers."""
        return key_of(self.step)

    @cached_property
    def problems(self) -> list[str]:
        """Sentences that say why no update can have these hyperparameters."""
        problems = []
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value <= 1:
                problems.append(f"{name} is {value}, not in [0, 1]")
        if self.step < 1:
            problems.append(f"step is {self.step} and not at least 1")
        for name, value in (("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                problems.append(f"{name} is {value}, not finite and at least 0")
        if not self.divisor >= 1e-37:
            problems.append(f"divisor is {self.divisor}, not at least 1e-37, as fp32 needs it")
        return problems


def check_arguments(
    state: Sequence[Tensor],
    grad: Tensor,
    ranges: Sequence[tuple[int, int, AdamStep]],
    into: Sequence[Tensor] | None,
    low: Tensor | None,
    only: np.ndarray | None,
) -> None:
    """See :meth:`CpuAdam.steps <gptpar.optim.cpu_adam.CpuAdam.steps>`.

    Raises:
        ValueError: naming every tensor and number that does not fit.
    """
    p, m, v = state
    length, wide = p.numel(), (p.dtype if p.dtype == torch.float64 else torch.float32,)
    wider = wide if p.dtype == torch.float64 else ()
    grads, lows = (*GRAD_TYPES, *wider), (torch.bfloat16, torch.float16, torch.float32, *wider)
    moment = (*wide, *KEPT_IN.values())
    given: list[tuple[str, Tensor, tuple[torch.dtype, ...]]] = [("p", p, wide), ("m", m, moment), ("v", v, moment)]
    if into is not None:
        formats = [(old.dtype,) if old.dtype in moment else moment for old in (m, v)]
        given += [("into[0]", into[0], wide), ("into[1]", into[1], formats[0]), ("into[2]", into[2], formats[1])]
    given.append(("grad", grad, grads))
    if low is not None:
        given.append(("low", low, lows))
    problems = problems_of_tensors(given, length)
    if not problems:
        problems += _overlaps({name: tensor for name, tensor, _ in given})
    end = 0
    for start, stop, how in ranges:
        if not end <= start <= stop <= length:
            problems.append(f"elements {start} to {stop} do not lie between {end} and {length}")
        end = stop
        problems += how.problems
    if only is not None:
        problems += _problems_of_ranges(only, length)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))


def _problems_of_ranges(only: np.ndarray, length: int) -> list[str]:
    """Checks all but the order, which the kernel checks: numpy would give Python's lock to other threads meanwhile."""
    if only.dtype != np.int64 or only.ndim != 2 or only.shape[1] != 2 or not only.flags.c_contiguous:
        return [f"only is {only.dtype} {only.shape}, not int64 (number of ranges, 2) in one piece"]
    if len(only) and (only[0, 0] < 0 or only[-1, 1] > length):
        return [f"the ranges of only, {only[0, 0]} to {only[-1, 1]}, do not lie within {length} elements"]
    return []


def problems_of_tensors(given: Sequence[tuple[str, Tensor, tuple[torch.dtype, ...]]], length: int) -> list[str]:
    """Sentences that say why vectors cannot be arguments.

    Args:
        given: (name, vector, the dtypes that it may have).
        length: that each has to have.
    """
    problems = []
    for name, tensor, dtypes in given:
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
            problems.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
        if tensor.dim() != 1 or tensor.numel() != length:
            problems.append(f"{name} has the shape {tuple(tensor.shape)}, not ({length},)")
        if not tensor.is_cpu:
            problems.append(f"{name} is on {tensor.device}, not on the CPU")
        elif not tensor.is_contiguous():
            problems.append(f"{name} is not contiguous: its strides are {tensor.stride()}")
    return problems


def _overlaps(given: Mapping[str, Tensor]) -> list[str]:
    """Sentences that name outputs sharing memory with another tensor: their values would depend on the order of writes.

    Two cases are allowed, because each element is read before it is written: an output may be the state that it
    replaces, and the low-precision parameters may be the gradient.
    """
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in given.values()]
    end = 0
    for start, stop in sorted(places):
        if start < end:
            return _overlaps_by_name(dict(zip(given, places, strict=True)))
        end = stop
    return []


def _overlaps_by_name(places: Mapping[str, tuple[int, int]]) -> list[str]:
    inputs = ("p", "m", "v", "grad")
    outputs = ("into[0]", "into[1]", "into[2]", "low") if "into[0]" in places else ("p", "m", "v", "low")
    own = dict(zip(outputs, inputs, strict=True))
    problems = []
    for name in (name for name in outputs if name in places):
        start, stop = places[name]
        for other, (first, last) in places.items():
            same = other == name or (other == own[name] and (first, last) == (start, stop))
            if not same and first < stop and start < last:
                problems.append(f"{name} overlaps {other} by {min(stop, last) - max(start, first)} bytes")
    return problems
