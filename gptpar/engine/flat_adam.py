"""AdamW over a device's flat vectors, which writes the live parameters in the same pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.device_adam import DeviceAdam, Piece, make_device_adam
from gptpar.optim.spans import ALIGNMENT, DECAYS, GroupSpan, spans_between

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


class FlatAdam:
    """AdamW as :mod:`gptpar.optim.adam_update` defines it; nothing waits for a GPU, whether a step is skipped or not.

    Args:
        spans: which elements are updated, and which of them decay.
        adam: default: the fastest for the state's device.
    """

    def __init__(self, state: State, spans: Sequence[GroupSpan], adam: DeviceAdam | None = None):
        self._state, self._spans = state, spans
        self._adam = adam or make_device_adam(state.weights)
        self._pieces: list[Piece] = []

    def lay_out(self, stretches: Sequence[Stretch]) -> None:
        """Set the stretches to update. Inside a stretch, spans begin at multiples of ``ALIGNMENT``."""
        self._pieces = [self._piece(*stretch) for stretch in _joined(stretches)]

    def _piece(self, start: int, stop: int, live: torch.Tensor | None) -> Piece:
        s, spans = self._state, spans_between(self._spans, start, stop)
        decays = torch.zeros(-(-(stop - start) // ALIGNMENT), dtype=torch.bool)
        for span in spans:
            if span.group == DECAYS:
                decays[span.start // ALIGNMENT : -(-span.stop // ALIGNMENT)] = True
        vectors = s.weights[start:stop], s.exp_avg[start:stop], s.exp_avg_sq[start:stop], s.grad[start:stop]
        return Piece(vectors, live, spans, decays.to(s.weights.device))

    @torch.no_grad()
    def step(self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float) -> torch.Tensor:
        """Update weights and live parameters.

        Args:
            how: this step's hyperparameters; the decay is that of the elements that have one.
            norm, loss_scale, max_norm: see :meth:`DeviceAdam.begin_step <gptpar.optim.device_adam.DeviceAdam>`.

        Returns:
            1.0 where the norm is not finite and nothing was changed, else 0.0 (fp32 scalar on the device, valid until
            the next step).
        """
        step = self._adam.begin_step(how, norm, loss_scale, max_norm, self._state.steps)
        for piece in self._pieces:
            step.update(piece)
        return step.skipped


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
