"""``Update``: what every optimizer declares, elementwise or over matrices: states, hyperparameters, flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

_AVERAGES_AND_EPS = ("beta1", "beta2", "alpha", "momentum", "eps")
"""Hyperparameters set to 1 in :meth:`unchanging`: betas of 1 keep a state as it is, eps of 1 avoids 0/0."""


class Hyperparameters(Protocol):
    """One parameter group's hyperparameters in one step: a ``NamedTuple`` of floats, these two among them.

    On a device the same class holds fp64 scalar tensors.
    """

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    def _replace(self, **values: float) -> Self: ...

    def __iter__(self) -> Iterator[float]: ...


@dataclass(frozen=True)
class Update:
    """The update of a parameter group: a description.

    Attributes:
        name: its value of ``--optimizer``, and the prefix of its own flags: ``--NAME-FIELD`` for each hyperparameter
            besides the learning rate and the weight decay.
        states: names of its state vectors, which checkpoints keep beside the master weights.
        hyperparameters: a ``NamedTuple`` class, see :class:`Hyperparameters`.
        numbers: (hyperparameters, number of the step, from 1) -> the numbers that all elements of a step share. It uses
            operators that give fp64 scalar tensors the same bits on the CPU and on the device.
        rounded: states that are kept in 16 or 8 bits -> their dtype (:mod:`gptpar.optim.rounded_states`).
    """

    name: str
    states: tuple[str, ...]
    hyperparameters: type[Any]
    numbers: Callable[[Any, Tensor], Sequence[Tensor]]
    rounded: Mapping[str, torch.dtype] = field(default_factory=dict, hash=False, kw_only=True)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that an update changes: ``weights`` (the master weights) and the states."""
        return ("weights", *self.states)

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the configuration's fields that belong to this update alone."""
        return tuple(self._own.values())

    @cached_property
    def _own(self) -> dict[str, str]:
        fields = [field for field in self.hyperparameters._fields if field not in ("lr", "weight_decay")]
        return {field: f"{self.name}_{field}" for field in fields}

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one element's master weight and state.

        Args:
            itemsize: bytes of one number.
        """
        return sum(self.rounded[name].itemsize if name in self.rounded else itemsize for name in self.vectors)

    @cached_property
    def unchanging(self) -> Hyperparameters:
        """Hyperparameters with which a gradient of zero changes neither the weight nor a state, in any bit."""
        values = {name: 1.0 for name in _AVERAGES_AND_EPS if name in self.hyperparameters._fields}
        found: Hyperparameters = self.hyperparameters(**dict.fromkeys(self.hyperparameters._fields, 0.0) | values)
        return found

    def configured(self, flags: Any, lr: float, weight_decay: float) -> Hyperparameters:
        """A step's hyperparameters.

        Args:
            flags: the configuration's section, with the fields that the hyperparameters name.
        """
        values = {field: float(getattr(flags, flag)) for field, flag in self._own.items()}
        found: Hyperparameters = self.hyperparameters(lr=lr, weight_decay=weight_decay, **values)
        return found

    def of_group(self, group: Mapping[str, Any]) -> Hyperparameters:
        """The hyperparameters of a torch parameter group: its ``betas`` is a pair, and any value may be a tensor.

        A group need not have a hyperparameter with a default.
        """
        pair = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        values = self.hyperparameters._field_defaults | pair | dict(group)
        found: Hyperparameters = self.hyperparameters(*(float(values[name]) for name in self.hyperparameters._fields))
        return found

    def group_of(self, how: Hyperparameters) -> dict[str, Any]:
        """The hyperparameters in the format of a torch parameter group."""
        values = dict(zip(self.hyperparameters._fields, how, strict=True))
        pair = [values.pop(name) for name in ("beta1", "beta2") if name in values]
        return values | ({"betas": tuple(pair)} if pair else {})
