"""AdamW's update of vectors in a device's memory, by the fastest implementation of :mod:`gptpar.optim.adam_update`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gptpar.kernels import gpu
from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.adam_update import (
    CLIP_EPS,
    MAX_STEP_BITS,
    Hyperparameters,
    UpdateNumbers,
    clipped_divisor,
    step_numbers_on_device,
    update,
)
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.spans import ALIGNMENT

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Vectors that one call updates.

    Attributes:
        vectors: [n] weights, both moments, and the gradient, whose dtype is not wider than theirs.
        live: [n] model parameters to be written, in a dtype of their own; ``None``: the weights are the parameters.
        spans: (start, stop, whether they decay) of the elements to be updated. Others may be updated, too: their
            gradients have to be zero.
        decays: [blocks] whether elements decay, by blocks of ``ALIGNMENT``; ``None``: all do.
    """

    vectors: Vectors
    live: torch.Tensor | None
    spans: Sequence[tuple[int, int, bool]]
    decays: torch.Tensor | None = None


class DeviceStep(Protocol):
    """One step of one family of parameter groups, whose numbers are known to the device."""

    @property
    def skipped(self) -> torch.Tensor:
        """1.0 where the gradient's norm is not finite and nothing changes, else 0.0 (fp32 scalar)."""

    def update(self, piece: Piece) -> None:
        """Update some vectors."""


class DeviceAdam(Protocol):
    """Makes the steps of one family of parameter groups."""

    def begin_step(
        self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
    ) -> DeviceStep:
        """Count a step and compute its numbers, without waiting for a GPU.

        Args:
            how: the hyperparameters of the elements that decay; those of the others have a weight decay of 0.
            norm: of the whole gradient, without the loss scale (fp64 scalar); if it is not finite, nothing changes.
            max_norm: the gradient is clipped to this norm (0: never).
            steps: steps so far (fp64 scalar on the device); raised by one, unless the step is skipped.
        """


def make_device_adam(like: torch.Tensor) -> DeviceAdam:
    """The fastest implementation for vectors of this dtype on this device."""
    if like.device.type == "cpu":
        return CpuDeviceAdam(CpuAdam(torch.get_num_threads()))
    return TritonAdam(like.device) if gpu.takes(like) else TorchAdam(like.dtype)


class CpuDeviceAdam:
    """On a CPU, by its compiled kernel."""

    def __init__(self, kernel: CpuAdam):
        self._kernel = kernel

    def begin_step(
        self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
    ) -> DeviceStep:
        skipped = (~norm.isfinite()).float()
        steps += 1 - skipped
        if skipped:
            return _CpuStep(self._kernel, None, skipped)
        divisor = clipped_divisor(norm.item(), loss_scale, max_norm)
        return _CpuStep(self._kernel, AdamStep(*how, int(steps.item()), divisor), skipped)


@dataclass(frozen=True)
class _CpuStep:
    kernel: CpuAdam
    how: AdamStep | None
    skipped: torch.Tensor

    def update(self, piece: Piece) -> None:
        if self.how is None:
            return
        without_decay = AdamStep(**{**vars(self.how), "weight_decay": 0.0})
        ranges = [(start, stop, self.how if decays else without_decay) for start, stop, decays in piece.spans]
        p, m, v, grad = piece.vectors
        self.kernel.steps(p, m, v, grad, ranges, low=piece.live)


class TritonAdam:
    """On a GPU, by Triton's kernels: one for the numbers, and one for each piece."""

    def __init__(self, device: torch.device):
        self._given = torch.zeros(8, dtype=torch.float64, device=device)
        self._places = self._given.unbind()
        self._filled: tuple[float, ...] = (0.0,) * 8
        self._numbers = torch.zeros(gpu.adam.NUM_NUMBERS, device=device)

    def begin_step(
        self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
    ) -> DeviceStep:
        wanted = (*how, loss_scale, max_norm, CLIP_EPS)
        for place, new, old in zip(self._places, wanted, self._filled, strict=True):
            if new != old:
                place.fill_(new)  # a copy from the host would wait for the device
        self._filled = wanted
        gpu.adam.step_numbers(self._given, norm, steps, self._numbers, MAX_STEP_BITS)
        return _TritonStep(self._numbers, self._numbers[-1])


@dataclass(frozen=True)
class _TritonStep:
    numbers: torch.Tensor
    skipped: torch.Tensor

    def update(self, piece: Piece) -> None:
        gpu.adam.update(*piece.vectors, piece.live, piece.decays, ALIGNMENT, self.numbers)


class TorchAdam:
    """By torch's operators, on any device.

    Args:
        dtype: of the master parameters.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def begin_step(
        self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
    ) -> DeviceStep:
        skipped = (~norm.isfinite()).float()
        steps += 1 - skipped
        number = steps.clamp(min=1.0)
        return _TorchStep(step_numbers_on_device(how, number, norm, loss_scale, max_norm, self._dtype), skipped)


@dataclass(frozen=True)
class _TorchStep:
    numbers: UpdateNumbers
    skipped: torch.Tensor

    def update(self, piece: Piece) -> None:
        for start, stop, decays in piece.spans:
            *state, grad = (vector[start:stop] for vector in piece.vectors)
            numbers = self.numbers if decays else self.numbers._replace(decay=1.0)
            low = None if piece.live is None else piece.live[start:stop]
            update(state, grad, numbers, low=low, skipped=self.skipped)
