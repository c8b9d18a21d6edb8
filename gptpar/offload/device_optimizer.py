"""The device's half of TwinFlowAdamW: the first elements, in the user's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from gptpar.offload.local_parameters import LocalParameter
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import UpdateVectors
from gptpar.optim.torch_kernels import make_device_kernel
from gptpar.optim.update import Hyperparameters


class DeviceOptimizer:
    """Updates the device's elements, and never waits for the device.

    The engine's :class:`~gptpar.engine.flat_optimizer.FlatOptimizer` updates flat vectors that the engine owns, and
    counts steps once for all of them. Here parameters and gradients stay where the user has them: an fp32 parameter is
    its own master weight, and a parameter without a gradient takes no step.

    Args:
        parameters: in one number format, or 16-bit and fp32. 16-bit parameters get fp32 master weights.
    """

    def __init__(self, parameters: Iterable[LocalParameter]):
        self._parameters = {local.unit: local for local in parameters if local.on_device}
        self._vectors: dict[str, dict[str, torch.Tensor]] = {}
        self._written: dict[str, torch.Tensor] = {}
        for unit, local in self._parameters.items():
            values = local.flat[: local.on_device]
            master = values.to(torch.promote_types(values.dtype, torch.float32))
            self._vectors[unit] = {"weights": master, **{name: torch.zeros_like(master) for name in ADAMW.states}}
            if local.has_masters:
                self._written[unit] = values
        self._kernels = {
            local.group: make_device_kernel(ADAMW, self._vectors[unit]["weights"])
            for unit, local in self._parameters.items()
        }
        # (group, number of steps, units): one bias correction applies to all of these units.
        self._alike: list[tuple[int, torch.Tensor, list[str]]] = []
        self.steps_taken = dict.fromkeys(self._parameters, 0)

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
            grads: unit -> [elements on device and host] its gradient; units without a gradient do not change.
        """
        alike, self._alike = self._alike, []
        for group, steps, units in alike:
            taking = [unit for unit in units if unit in grads]
            if 0 < len(taking) < len(units):  # their numbers of steps differ from now on
                self._alike.append((group, steps.clone(), [unit for unit in units if unit not in grads]))
            self._alike.append((group, steps, taking or units))
            if not taking:
                continue
            step = self._kernels[group].begin_step(hyperparameters[group], norm, loss_scale, max_norm, steps)
            for unit in taking:
                count = self._parameters[unit].on_device
                vectors = *self._vectors[unit].values(), grads[unit][:count]
                step.update(UpdateVectors(vectors, self._written.get(unit), ((0, count, True),)))

    def values(self, unit: str, kind: str) -> torch.Tensor:
        """[n] ``weights`` or one of the states of a unit that has elements on the device."""
        return self._vectors[unit][kind]

    @property
    def steps_taken(self) -> dict[str, int]:
        """Unit -> number of its updates so far; waits for the device."""
        return {unit: int(steps.item()) for _, steps, units in self._alike for unit in units}

    @steps_taken.setter
    def steps_taken(self, counts: Mapping[str, int]) -> None:
        alike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for unit, local in self._parameters.items():
            alike[local.group, counts[unit]].append(unit)
        self._alike = [
            (group, self.values(units[0], "weights").new_full((), count, dtype=torch.float64), units)
            for (group, count), units in alike.items()
        ]
