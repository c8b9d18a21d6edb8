"""AdamW over a device's flat vectors, in one pass over memory where it is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gptpar.optim.buckets import Rates
from gptpar.optim.cpu_adam import AdamStep, CpuAdam
from gptpar.optim.runs import DECAYS, Run, cut
from gptpar.zero.units import ALIGNMENT

MOST_ELEMENTS = {"compiled": 1 << 30, "cuda": 1 << 26, "cpu": 1 << 17}
"""In one call: indices fit 32 bits; launched op by op, the values in between take little memory, or stay in a cache."""

Stretch = tuple[int, int, torch.Tensor | None]
"""First element, the one behind the last, and the live parameters there, where they are no masters."""


@dataclass(frozen=True)
class State:
    """[n] vectors of one process.

    Attributes:
        grad: of any number format not wider than the others.
        steps: updates made, those of skipped steps not counted (fp64 scalar on the device).
    """

    weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class _Piece:
    """What one call updates: weights, both moments and gradient; which blocks decay, and the same as stretches."""

    vectors: tuple[torch.Tensor, ...]
    live: torch.Tensor | None
    decays: torch.Tensor
    runs: tuple[Run, ...]

    def blocks(self) -> tuple[torch.Tensor | None, ...]:
        """[blocks, width] views; what is no whole number of blocks is one short one."""
        shape = (len(self.decays), -1)
        return (*(t.view(shape) for t in self.vectors), None if self.live is None else self.live.view(shape))


class FlatAdam:
    """AdamW (Loshchilov and Hutter 2019); skipping happens on the device, without waiting for it.

    Args:
        runs: which elements decay.
        compiled: whether one GPU kernel does everything. On a CPU fp32 is updated by ``csrc/cpu_adam.cpp``.
    """

    def __init__(self, state: State, runs: Sequence[Run], *, compiled: bool):
        self._state, self._runs = state, runs
        on_cpu = state.weights.device.type == "cpu" and state.weights.dtype == torch.float32
        kernel = CpuAdam(torch.get_num_threads()) if on_cpu else None
        self._kernel = kernel if kernel is not None and kernel.native else None
        self._most = MOST_ELEMENTS["compiled" if compiled else state.weights.device.type]
        self._pieces: list[_Piece] = []
        self._update: Callable[..., None] = _update
        if compiled:
            self._update = torch.compile(_update, dynamic=True, fullgraph=True)

    def lay_out(self, stretches: Sequence[Stretch]) -> None:
        """Say what is to be updated, in order; within a stretch, runs begin at multiples of ``ALIGNMENT``."""
        self._pieces = [self._piece(*piece) for stretch in _joined(stretches) for piece in self._cut(*stretch)]

    def _piece(self, start: int, stop: int, live: torch.Tensor | None) -> _Piece:
        s, runs = self._state, tuple(cut(self._runs, start, stop))
        decays = torch.zeros(max(1, (stop - start) // ALIGNMENT), dtype=torch.bool)
        for run in runs:
            if run.group == DECAYS:
                decays[run.start // ALIGNMENT : -(-run.stop // ALIGNMENT)] = True
        vectors = tuple(t[start:stop] for t in (s.weights, s.exp_avg, s.exp_avg_sq, s.grad))
        return _Piece(vectors, live, decays.to(s.weights.device).view(-1, 1), runs)

    def _cut(self, start: int, stop: int, live: torch.Tensor | None) -> Iterator[Stretch]:
        """Pieces of whole blocks, and what is left at the end."""
        whole = stop - (stop - start) % ALIGNMENT
        ends = [*range(start, whole, self._most), whole, stop]
        for low, high in itertools.pairwise(ends):
            if low < high:
                yield low, high, None if live is None else live[low - start : high - start]

    @torch.no_grad()
    def step(self, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        """Update weights and live parameters.

        Args:
            rates: this step's numbers; the decay is that of the elements that have one.
            divisor: what gradients are divided by (scalar).
            skipped: not 0 where nothing is to change (scalar).
        """
        if self._kernel is not None:
            self._step_on_cpu(self._kernel, rates, divisor, skipped)
            return
        numbers = self._numbers(rates, divisor, skipped)
        for piece in self._pieces:
            self._update(*piece.blocks(), piece.decays, numbers)

    def _step_on_cpu(self, kernel: CpuAdam, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        if skipped.item():
            return
        step = int(self._state.steps.add_(1).item())
        decaying = AdamStep(rates.lr, rates.beta1, rates.beta2, rates.eps, rates.weight_decay, step, divisor.item())
        how = (decaying, replace(decaying, weight_decay=0.0))
        for piece in self._pieces:
            p, m, v, grad = piece.vectors
            kernel.steps(p, m, v, grad, [(r.start, r.stop, how[r.group]) for r in piece.runs], low=piece.live)

    def _numbers(self, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """[9] computed in double precision and rounded once, in the order in which the update takes them."""
        taken = skipped == 0
        steps = self._state.steps.add_(taken)
        steps = steps.clamp(min=1.0)
        size = rates.lr / (1 - torch.pow(rates.beta1, steps))
        root = (1 - torch.pow(rates.beta2, steps)).sqrt()
        fixed = (1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps, 1 - rates.lr * rates.weight_decay)
        filled = [torch.full_like(size, number) for number in fixed]  # a copy from the host would wait for the device
        return torch.stack([*filled, divisor.double(), size, root, taken.double()]).to(self._state.weights.dtype)


def _update(
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    live: torch.Tensor | None,
    decays: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """The same operations as in ``csrc/cpu_adam_loop.h``. [blocks, width] each; ``decays`` is [blocks, 1]."""
    rest1, beta2, rest2, eps, decay, divisor, size, root, taken = numbers.unbind()
    g = grad.to(weights.dtype) / divisor
    m = exp_avg + (g - exp_avg) * rest1
    v = exp_avg_sq * beta2 + rest2 * g * g
    w = weights * torch.where(decays, decay, 1.0) - size * (m / (v.sqrt() / root + eps))
    for old, new in ((exp_avg, m), (exp_avg_sq, v), (weights, w)):
        old.copy_(torch.where(taken != 0, new, old))
    if live is not None:
        live.copy_(weights)


def _joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The same as few, where what follows begins a block and its parameters lie behind the others in memory."""
    found: list[Stretch] = []
    for start, stop, live in stretches:
        if start == stop:
            continue
        if found and (stop - found[-1][0]) % ALIGNMENT == (stop - start) % ALIGNMENT and found[-1][1] == start:
            before = found[-1][2]
            if before is None and live is None:
                found[-1] = (found[-1][0], stop, None)
                continue
            if before is not None and live is not None and _follows(before, live):
                both = before.as_strided((len(before) + len(live),), (1,))
                found[-1] = (found[-1][0], stop, both)
                continue
        found.append((start, stop, live))
    return found


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and other.data_ptr() == one.data_ptr() + len(one) * one.element_size()
