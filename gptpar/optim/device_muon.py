"""Muon's fused elementwise parts on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptpar.kernels import gpu
from gptpar.optim.elementwise import DeviceStep, UpdateVectors
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.torch_kernels import MatrixDeviceStep, TorchDeviceKernel
from gptpar.optim.update import Hyperparameters


class TritonMuon(TorchDeviceKernel):
    """Does each part in one pass over memory, with the bits of torch's operators.

    Args:
        nesterov: see :class:`~gptpar.optim.cpu_adam.CpuMuon`.
    """

    def __init__(self, optimizer: MatrixUpdate, dtype: torch.dtype, *, nesterov: bool):
        super().__init__(optimizer, dtype)
        self._nesterov = nesterov

    def begin_step(
        self, how: Hyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
    ) -> DeviceStep:
        step = super().begin_step(how, norm, loss_scale, max_norm, steps)
        assert isinstance(step, MatrixDeviceStep)
        one, share = torch.ones_like(step.numbers.scale), -step.numbers.own[0]
        return _FusedStep(step.matrix_update, step.numbers, step.skipped, self._nesterov, one, share)


@dataclass(frozen=True)
class _FusedStep(MatrixDeviceStep):
    """One step.

    Attributes:
        share: of the directions in the weights: minus the learning rate.
    """

    nesterov: bool
    one: torch.Tensor
    share: torch.Tensor

    def average(self, momentum: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> None:
        scale, _, (_, kept, share) = self.numbers
        gpu.blend.blend(momentum, grad, out, scale, share, kept, self.skipped, looks_ahead=self.nesterov)

    def update(self, this: UpdateVectors) -> None:
        for start, stop, decays in this.ranges:
            weights, directions = (vector[start:stop] for vector in this.vectors)
            low = None if this.parameters is None else this.parameters[start:stop]
            kept = self.numbers.decay if decays else self.one
            gpu.blend.blend(weights, directions, low, self.one, self.share, kept, self.skipped, looks_ahead=False)
