"""Parameters that the user freezes and trains again while an engine has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.engine.engine import Engine
from gptpar.errors import GptparError
from gptpar.optim.update import Hyperparameters


class Subgroup(NamedTuple):
    """Parameters of one group that are updated alike.

    Attributes:
        group: number of the group.
        missed: steps that they missed while frozen.
        is_frozen: whether they are frozen now.
    """

    group: int
    missed: int
    is_frozen: bool


class FrozenParameters:
    """Updates neither values nor states of parameters while they require no gradient.

    As in torch, a parameter does not count the steps that it misses, so that its bias corrections go on where they
    were. The engine takes the hyperparameters and the number of a step by group: here each group is divided into
    subgroups, which are groups to the engine, whenever other parameters are frozen.

    Args:
        optimizer: has the user's groups.
        engine: updates them.
        parameters: the trained ones, by first name.
    """

    def __init__(self, optimizer: EngineOptimizer, engine: Engine, parameters: Mapping[str, nn.Parameter]):
        self._optimizer, self._engine, self._parameters = optimizer, engine, parameters
        names = {parameter: name for name, parameter in parameters.items()}
        groups = enumerate(optimizer.param_groups)
        self._group_of = {names[p]: place for place, group in groups for p in group["params"] if p in names}
        self._frozen: frozenset[str] = frozenset()
        self._subgroups = [Subgroup(place, 0, is_frozen=False) for place in range(len(optimizer.param_groups))]
        self._subgroup_of = dict(self._group_of)
        self._told: tuple[int, ...] = ()  # the missed steps that the engine knows
        self._loaded: Mapping[str, int] | None = None

    def begin_step(self, read_last_step: Callable[[], None]) -> None:
        """Find the frozen parameters; they stay the same until the step's end.

        Args:
            read_last_step: reads the numbers of the last step, and counts it if it changed anything. Parameters that
                were frozen in that step missed it; those that are frozen in this one alone did not.
        """
        frozen = self._now()
        if frozen or self._frozen:
            read_last_step()
        if frozen != self._frozen or self._loaded is not None:
            self._divide(frozen, self.missed)
            self._frozen, self._loaded = frozen, None
            for unit in self._engine.table.units:
                self._engine.gradients.expect(unit.name, len(unit.params.keys() - frozen))
        missed = tuple(one.missed for one in self._subgroups)
        if missed != self._told:
            self._told = missed
            self._engine.optimizer.miss(missed if any(missed) else ())

    def _divide(self, frozen: frozenset[str], missed: Mapping[str, int]) -> None:
        """Let parameters that are updated alike be one group of the engine; each group of the user has one or more."""
        found = {name: Subgroup(place, missed.get(name, 0), name in frozen) for name, place in self._group_of.items()}
        empty = [Subgroup(place, 0, is_frozen=False) for place in range(len(self._optimizer.param_groups))]
        subgroups = sorted({*found.values(), *empty})
        number = {subgroup: place for place, subgroup in enumerate(subgroups)}
        subgroup_of = {name: number[subgroup] for name, subgroup in found.items()}
        groups = [one.group for one in subgroups]
        if subgroup_of != self._subgroup_of or groups != [one.group for one in self._subgroups]:
            self._engine.divide_groups(subgroup_of, groups)
            self._told = ()  # the missed steps belonged to the former groups
        self._subgroups, self._subgroup_of = subgroups, subgroup_of

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are frozen in this step, or were in the last one."""
        return self._frozen

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that are not frozen in this step."""
        return set(self._parameters) - self._frozen

    @property
    def missed(self) -> Mapping[str, int]:
        """Name -> steps that the parameter missed, if any."""
        if self._loaded is not None:
            return self._loaded
        found = {name: self._subgroups[place].missed for name, place in self._subgroup_of.items()}
        return {name: missed for name, missed in found.items() if missed}

    def load(self, missed: Mapping[str, int]) -> None:
        """Go on as if parameters had missed these steps."""
        self._loaded = dict(missed)

    def require_unchanged(self) -> None:
        """Check that the same parameters are frozen as when the step began.

        Raises:
            GptparError: others are.
        """
        changed = self._now() ^ self._frozen
        if changed:
            raise GptparError(
                f"requires_grad of {len(changed)} parameters, {min(changed)} among them, was changed within a step: "
                "change it between engine.step() and the next backward pass, or call engine.zero_grad() first."
            )

    def _now(self) -> frozenset[str]:
        with torch._C.DisableTorchFunctionSubclass():  # avoids the guard of released parameters, which takes time
            return frozenset(name for name, p in self._parameters.items() if not p.requires_grad)

    def hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """The present hyperparameters of each group of the engine."""
        found, updates = self._optimizer.hyperparameters(), self._optimizer.updates
        return tuple(updates[one.group].unchanging if one.is_frozen else found[one.group] for one in self._subgroups)

    def count_step(self) -> None:
        """A step has changed the parameters that are not frozen."""
        if self._frozen:
            self._subgroups = [one._replace(missed=one.missed + one.is_frozen) for one in self._subgroups]
