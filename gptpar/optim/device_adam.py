"""AdamW's fused update of vectors in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gptpar.kernels import gpu
from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import CLIP_EPS, MAX_STEP_BITS, DeviceKernel, DeviceStep, UpdateVectors, clipped_divisor
from gptpar.optim.group_ranges import ALIGNMENT


def device_adam(like: torch.Tensor) -> DeviceKernel | None:
    """A fused kernel for master weights with the dtype and device of ``like``, if there is one."""
    if like.device.type == "cpu":
        return CpuDeviceAdam(CpuAdam(torch.get_num_threads()))
    return TritonAdam(like.device) if gpu.takes(like) else None


class CpuDeviceAdam:
    """Updates vectors with the compiled CPU kernel, when the device is the CPU."""

    def __init__(self, kernel: CpuAdam):
        self._kernel = kernel

    def begin_step(
        self, how: AdamHyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
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

    def update(self, this: UpdateVectors) -> None:
        if self.how is None:
            return
        without_decay = replace(self.how, weight_decay=0.0)
        ranges = [(start, stop, self.how if decays else without_decay) for start, stop, decays in this.ranges]
        *state, grad = this.vectors
        self.kernel.steps(state, grad, ranges, low=this.parameters)


class TritonAdam:
    """Updates vectors on a GPU with Triton kernels: one computes a step's numbers, the other updates vectors."""

    def __init__(self, device: torch.device):
        self._given = torch.zeros(9, dtype=torch.float64, device=device)
        self._places = self._given.unbind()
        self._filled: tuple[float, ...] = (0.0,) * 9
        self._numbers = torch.zeros(gpu.adam.NUM_NUMBERS, device=device)

    def begin_step(
        self, how: AdamHyperparameters, norm: torch.Tensor, loss_scale: float, max_norm: float, steps: torch.Tensor
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

    def update(self, this: UpdateVectors) -> None:
        p, m, v, grad = this.vectors
        gpu.adam.update(p, m, v, grad, this.parameters, this.decays, ALIGNMENT, self.numbers)
