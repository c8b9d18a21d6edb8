"""AdamW over a device's flat vectors, which writes the live parameters in the same pass over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gptpar.kernels import gpu
from gptpar.optim.buckets import Rates
from gptpar.optim.cpu_adam import AdamStep, CpuAdam
from gptpar.optim.runs import DECAYS, Run, cut
from gptpar.zero.units import ALIGNMENT

MOST_FUSED = 1 << 24
"""Elements of one call of torch's fused kernel, for which the gradient is copied to the masters' number format."""

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Stretch = tuple[int, int, torch.Tensor | None]
"""First element, the one behind the last, and their live parameters, unless the masters are those."""


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
    """What one call updates.

    Attributes:
        vectors: weights, both moments and gradient.
        decays: [blocks] which blocks of ``ALIGNMENT`` elements decay.
        runs: the same as stretches, counted within the piece.
    """

    vectors: Vectors
    live: torch.Tensor | None
    decays: torch.Tensor
    runs: tuple[Run, ...]


class FlatAdam:
    """AdamW (Loshchilov and Hutter 2019).

    On a GPU nothing waits for the device, whether a step is skipped or not. There one kernel does everything, or in
    fp64 torch's fused one between two casts; on a CPU :class:`~gptpar.optim.cpu_adam.CpuAdam` does.

    Args:
        runs: which elements decay.
    """

    def __init__(self, state: State, runs: Sequence[Run]):
        self._state, self._runs = state, runs
        on_cpu = state.weights.device.type == "cpu"
        self._kernel = CpuAdam(torch.get_num_threads()) if on_cpu else None
        self._in_triton = gpu.takes(state.weights)
        self._pieces: list[_Piece] = []

    def lay_out(self, stretches: Sequence[Stretch]) -> None:
        """Say what is to be updated, in order; within a stretch, runs begin at multiples of ``ALIGNMENT``."""
        self._pieces = [self._piece(*piece) for stretch in _joined(stretches) for piece in self._cut(*stretch)]

    def _piece(self, start: int, stop: int, live: torch.Tensor | None) -> _Piece:
        s, runs = self._state, tuple(cut(self._runs, start, stop))
        decays = torch.zeros(-(-(stop - start) // ALIGNMENT), dtype=torch.bool)
        for run in runs:
            if run.group == DECAYS:
                decays[run.start // ALIGNMENT : -(-run.stop // ALIGNMENT)] = True
        vectors = s.weights[start:stop], s.exp_avg[start:stop], s.exp_avg_sq[start:stop], s.grad[start:stop]
        return _Piece(vectors, live, decays.to(s.weights.device), runs)

    def _cut(self, start: int, stop: int, live: torch.Tensor | None) -> Iterator[Stretch]:
        most = MOST_FUSED if self._kernel is None and not self._in_triton else stop
        for low in range(start, stop, most):
            high = min(low + most, stop)
            yield low, high, None if live is None else live[low - start : high - start]

    @torch.no_grad()
    def step(self, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        """Update weights and live parameters.

        Args:
            rates: this step's numbers; the decay is that of the elements that have one.
            divisor: what gradients are divided by (scalar).
            skipped: 1.0 where nothing is to change, else 0.0 (fp32 scalar).
        """
        self._state.steps.add_(skipped == 0)
        if self._kernel is not None:
            self._step_on_cpu(self._kernel, rates, divisor, skipped)
        elif self._in_triton:
            numbers = self._numbers(rates, divisor, skipped)
            for piece in self._pieces:
                gpu.adam.update(*piece.vectors, piece.live, piece.decays, ALIGNMENT, numbers)
        else:
            self._step_by_torch(rates, divisor, skipped)

    def _step_on_cpu(self, kernel: CpuAdam, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        if skipped.item():
            return
        step = int(self._state.steps.item())
        decaying = AdamStep(rates.lr, rates.beta1, rates.beta2, rates.eps, rates.weight_decay, step, divisor.item())
        how = (decaying, replace(decaying, weight_decay=0.0))
        for piece in self._pieces:
            p, m, v, grad = piece.vectors
            kernel.steps(p, m, v, grad, [(r.start, r.stop, how[r.group]) for r in piece.runs], low=piece.live)

    def _step_by_torch(self, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        steps = self._state.steps.float()
        for piece in self._pieces:
            for run in piece.runs:
                weights, exp_avg, exp_avg_sq, grad = (t[run.start : run.stop] for t in piece.vectors)
                torch._fused_adamw_(
                    [weights],
                    [grad.to(weights.dtype, copy=True).div_(divisor)],
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [steps],
                    lr=rates.lr,
                    beta1=rates.beta1,
                    beta2=rates.beta2,
                    weight_decay=rates.weight_decay if run.group == DECAYS else 0.0,
                    eps=rates.eps,
                    amsgrad=False,
                    maximize=False,
                    found_inf=skipped,
                )
            if piece.live is not None:
                piece.live.copy_(piece.vectors[0])

    def _numbers(self, rates: Rates, divisor: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """[9] computed in double precision and rounded once, in the order in which the update takes them."""
        steps = self._state.steps.clamp(min=1.0)
        size = rates.lr / (1 - torch.pow(rates.beta1, steps))
        root = (1 - torch.pow(rates.beta2, steps)).sqrt()
        fixed = (1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps, 1 - rates.lr * rates.weight_decay)
        filled = [torch.full_like(size, number) for number in fixed]  # a copy from the host would wait for the device
        return torch.stack([*filled, divisor.double(), size, root, skipped.double()]).to(self._state.weights.dtype)


def _joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The same elements in as few stretches as possible."""
    found: list[Stretch] = []
    for start, stop, live in stretches:
        if start == stop:
            continue
        if found and _goes_on(found[-1], start, live):
            start, _, before = found.pop()
            if live is not None and before is not None:
                live = before.as_strided((len(before) + len(live),), (1,))
        found.append((start, stop, live))
    return found


def _goes_on(before: Stretch, start: int, live: torch.Tensor | None) -> bool:
    """Whether a stretch begins a block behind another one, and so do its live parameters in memory."""
    first, stop, other = before
    if stop != start or (start - first) % ALIGNMENT:
        return False
    if other is None or live is None:
        return other is live
    same = other.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    return same and live.data_ptr() == other.data_ptr() + len(other) * other.element_size()
