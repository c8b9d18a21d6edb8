"""The elements of any parameters that the device itself updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.device_adam import DeviceAdam, Piece, make_device_adam
from gptpar.optim.spans import DECAYS, Span


@dataclass
class _Together:
    """Units of one parameter group that have taken the same steps.

    Attributes:
        steps: how many (fp64 scalar on the device).
    """

    group: int
    steps: torch.Tensor
    adam: DeviceAdam
    units: list[str] = field(default_factory=list)


class DeviceOptimizer:
    """AdamW as :mod:`gptpar.optim.adam_update` defines it; nothing waits for the device.

    Args:
        live: unit -> [n] the parameters' memory, all in one number format or its 16-bit relatives. 16-bit ones get
            fp32 masters; the others are their own.
        groups: unit -> number of its group.

    Attributes:
        masters: unit -> [n] master weights.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], groups: Mapping[str, int]):
        self.masters = {
            unit: values.detach().to(torch.promote_types(values.dtype, torch.float32)) for unit, values in live.items()
        }
        self._live = {unit: values for unit, values in live.items() if values.dtype.itemsize == 2}
        self._moments = {unit: (torch.zeros_like(p), torch.zeros_like(p)) for unit, p in self.masters.items()}
        self._groups = dict(groups)
        self._together: list[_Together] = []
        self._take_steps(dict.fromkeys(live, 0))

    @torch.no_grad()
    def step(
        self,
        norm: torch.Tensor,
        hyperparameters: Sequence[Hyperparameters],
        loss_scale: float,
        max_norm: float,
        grads: Mapping[str, torch.Tensor],
    ) -> None:
        """Update masters and parameters, unless the norm is not finite.

        Args:
            norm: the whole gradient's, without the loss scale (fp64 scalar on the device).
            hyperparameters: by group.
            max_norm: the gradient is clipped to this norm (0: never).
            grads: unit -> [n]; units without one stay as they are.
        """
        self._separate(grads)
        for together in self._together:
            if together.units[0] not in grads:
                continue
            how = hyperparameters[together.group]
            step = together.adam.begin_step(how, norm, loss_scale, max_norm, together.steps)
            for unit in together.units:
                step.update(self._piece(unit, grads[unit]))

    def _piece(self, unit: str, grad: torch.Tensor) -> Piece:
        vectors = self.masters[unit], *self._moments[unit], grad
        return Piece(vectors, self._live.get(unit), (Span(0, len(grad), DECAYS),))

    def _separate(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Count apart, from now on, what takes a step and what does not."""
        for together in list(self._together):
            staying = [unit for unit in together.units if unit not in grads]
            if staying and len(staying) < len(together.units):
                together.units = [unit for unit in together.units if unit in grads]
                self._together.append(self._new_together(together.group, together.steps.clone(), staying))

    def _new_together(self, group: int, steps: torch.Tensor, units: list[str]) -> _Together:
        return _Together(group, steps, make_device_adam(self.masters[units[0]]), units)

    def _take_steps(self, steps: Mapping[str, int]) -> None:
        """Go on as if each unit had taken so many steps."""
        alike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for unit, count in steps.items():
            alike[self._groups[unit], count].append(unit)
        self._together = []
        for (group, count), units in alike.items():
            counter = torch.full((), float(count), dtype=torch.float64, device=self.masters[units[0]].device)
            self._together.append(self._new_together(group, counter, units))

    def values(self, unit: str, kind: str) -> torch.Tensor:
        """[n] live ``weights``, ``exp_avg`` or ``exp_avg_sq``; of a unit that is not here, none."""
        if unit not in self.masters:
            return torch.empty(0)
        return self.masters[unit] if kind == "weights" else self._moments[unit][kind == "exp_avg_sq"]

    @property
    def steps_taken(self) -> dict[str, int]:
        """Each unit's updates so far; waits for the device."""
        return {unit: int(together.steps.item()) for together in self._together for unit in together.units}

    @steps_taken.setter
    def steps_taken(self, steps: Mapping[str, int]) -> None:
        self._take_steps({unit: steps[unit] for unit in self.masters})
