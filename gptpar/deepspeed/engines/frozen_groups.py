"""Parameter groups that the user freezes and trains again while an engine has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.engine.engine import Engine
from gptpar.errors import GptparError
from gptpar.optim.update import Hyperparameters

MISSED = "missed_steps"
"""Key of a parameter group: the number of steps that it missed while frozen. Bias corrections do not count them."""


class FrozenGroups:
    """Updates neither weights nor states of a group while its parameters require no gradient.

    An engine has laid out which groups are updated together, so a group is frozen as a whole. As in torch, a group does
    not count the steps that it misses.

    Args:
        optimizer: has the groups.
        engine: updates them.
        parameters: the trained ones, by first name.
    """

    def __init__(self, optimizer: EngineOptimizer, engine: Engine, parameters: Mapping[str, nn.Parameter]):
        self._optimizer, self._engine, self._parameters = optimizer, engine, parameters
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._frozen_names: frozenset[str] = frozenset()
        self._frozen: list[dict[str, Any]] = []
        self._missed = (0,) * len(optimizer.param_groups)

    def begin_step(self) -> None:
        """Find the frozen groups; they stay the same until the step's end.

        Raises:
            GptparError: a part of a group is frozen.
        """
        before, self._frozen_names = self._frozen_names, self._now()
        if self._frozen_names != before:
            self._find_groups()
            for unit in self._engine.table.units:
                self._engine.gradients.expect(unit.name, len(unit.params.keys() - self._frozen_names))
        missed = tuple(group.get(MISSED, 0) for group in self._optimizer.param_groups)
        if missed != self._missed:
            self._missed = missed
            self._engine.optimizer.miss(missed if any(missed) else ())

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that are not frozen in this step."""
        return set(self._parameters) - self._frozen_names

    def _find_groups(self) -> None:
        self._frozen = []
        for place, group in enumerate(self._optimizer.param_groups):
            names = {self._names[p] for p in group["params"] if p in self._names}
            frozen = names & self._frozen_names
            if frozen and frozen != names:
                self._frozen_names = frozenset({""})  # so that the next step looks again
                raise GptparError(
                    f"{len(frozen)} of the {len(names)} trained parameters of group {place}, {min(frozen)} among them, "
                    "no longer require a gradient: a group is frozen as a whole, so give these a group of their own in "
                    "model_parameters."
                )
            if frozen:
                self._frozen.append(group)

    def require_unchanged(self) -> None:
        """Check that the same parameters are frozen as when the step began.

        Raises:
            GptparError: others are.
        """
        changed = self._now() ^ self._frozen_names
        if changed:
            raise GptparError(
                f"requires_grad of {len(changed)} parameters, {min(changed)} among them, was changed within a step: "
                "change it between engine.step() and the next backward pass, or call engine.zero_grad() first."
            )

    def _now(self) -> frozenset[str]:
        with torch._C.DisableTorchFunctionSubclass():  # avoids the guard of released parameters, which takes time
            return frozenset(name for name, p in self._parameters.items() if not p.requires_grad)

    def hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """The present hyperparameters of each group."""
        found = self._optimizer.hyperparameters()
        if not self._frozen:
            return found
        frozen = {id(group) for group in self._frozen}
        groups = zip(self._optimizer.param_groups, found, self._engine.optimizer.updates, strict=True)
        return tuple(update.unchanging if id(group) in frozen else how for group, how, update in groups)

    def count_step(self) -> None:
        """A step has changed the other groups."""
        for group in self._frozen:
            group[MISSED] = group.get(MISSED, 0) + 1
