"""The device's half of an elementwise optimizer over any parameters; the CPU optimizer is the other half."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gptpar.optim.elementwise import DeviceKernel, ElementwiseOptimizer, UpdateVectors
from gptpar.optim.torch_kernels import make_device_kernel
from gptpar.optim.update import Hyperparameters


@dataclass
class _StepGroup:
    """Units of one parameter group with equal numbers of steps: one bias correction applies to all of them.

    Attributes:
        steps: number of steps taken (fp64 scalar on the device).
    """

    group: int
    steps: torch.Tensor
    kernel: DeviceKernel
    units: list[str] = field(default_factory=list)


class DeviceOptimizer:
    """Updates the device's elements, and never waits for the device.

    Args:
        optimizer: defines the update.
        parameters: unit -> [n] the model parameters' memory, all in one number format, or 16-bit and fp32. 16-bit
            parameters get fp32 master weights; the others are their own master weights.
        groups: unit -> number of its group.

    Attributes:
        master_weights: unit -> [n] master weights.
    """

    def __init__(
        self, optimizer: ElementwiseOptimizer, parameters: Mapping[str, torch.Tensor], groups: Mapping[str, int]
    ):
        self._optimizer = optimizer
        self.master_weights = {
            unit: values.detach().to(torch.promote_types(values.dtype, torch.float32))
            for unit, values in parameters.items()
        }
        self._parameters = {unit: values for unit, values in parameters.items() if values.dtype.itemsize == 2}
        self._vectors = {
            unit: {"weights": p, **{name: torch.zeros_like(p) for name in optimizer.states}}
            for unit, p in self.master_weights.items()
        }
        self._groups = dict(groups)
        self._step_groups: list[_StepGroup] = []
        self._take_steps(dict.fromkeys(parameters, 0))

    @torch.no_grad()
    def step(
        self,
        norm: torch.Tensor,
        hyperparameters: Sequence[Hyperparameters],
        loss_scale: float,
        max_norm: float,
        grads: Mapping[str, torch.Tensor],
    ) -> None:
        """Update master weights and parameters, unless the norm is not finite.

        Args:
            norm: norm of the whole gradient, without the loss scale (fp64 scalar on the device).
            hyperparameters: by group.
            max_norm: the gradient is clipped to this norm (0: never).
            grads: unit -> [n] its gradient; units without a gradient do not change.
        """
        self._separate(grads)
        for step_group in self._step_groups:
            if step_group.units[0] not in grads:
                continue
            how = hyperparameters[step_group.group]
            step = step_group.kernel.begin_step(how, norm, loss_scale, max_norm, step_group.steps)
            for unit in step_group.units:
                step.update(self._call(unit, grads[unit]))

    def _call(self, unit: str, grad: torch.Tensor) -> UpdateVectors:
        vectors = *self._vectors[unit].values(), grad
        return UpdateVectors(vectors, self._parameters.get(unit), ((0, len(grad), True),))

    def _separate(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Split step groups in which some units take this step and others do not: their counts differ from now on."""
        for step_group in list(self._step_groups):
            staying = [unit for unit in step_group.units if unit not in grads]
            if staying and len(staying) < len(step_group.units):
                step_group.units = [unit for unit in step_group.units if unit in grads]
                self._step_groups.append(self._new_step_group(step_group.group, step_group.steps.clone(), staying))

    def _new_step_group(self, group: int, steps: torch.Tensor, units: list[str]) -> _StepGroup:
        return _StepGroup(group, steps, make_device_kernel(self._optimizer, self.master_weights[units[0]]), units)

    def _take_steps(self, steps: Mapping[str, int]) -> None:
        """Continue as if each unit had taken ``steps[unit]`` steps."""
        alike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for unit, count in steps.items():
            alike[self._groups[unit], count].append(unit)
        self._step_groups = []
        for (group, count), units in alike.items():
            counter = torch.full((), float(count), dtype=torch.float64, device=self.master_weights[units[0]].device)
            self._step_groups.append(self._new_step_group(group, counter, units))

    def values(self, unit: str, kind: str) -> torch.Tensor:
        """[n] ``weights`` or one of the states of a unit; empty if the device has no elements of it."""
        return self._vectors[unit][kind] if unit in self._vectors else torch.empty(0)

    @property
    def steps_taken(self) -> dict[str, int]:
        """Unit -> number of its updates so far; waits for the device."""
        return {unit: int(step_group.steps.item()) for step_group in self._step_groups for unit in step_group.units}

    @steps_taken.setter
    def steps_taken(self, steps: Mapping[str, int]) -> None:
        self._take_steps({unit: steps[unit] for unit in self.master_weights})
