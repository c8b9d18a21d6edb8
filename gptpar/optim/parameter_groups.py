"""A GPT's parameter groups: each one's update, and what its learning rate and weight decay are multiplied by.

An optimizer over matrices (Muon) updates the matrices of the blocks, and AdamW everything else: embedding, LM head,
biases and norms. Matrices decay (:func:`~gptpar.optim.group_ranges.is_matrix`). ``--lr-override`` and
``--weight-decay-override`` give other factors by name, and muP scales learning rates (:mod:`gptpar.model.mup`).
``--decoupled-lr`` is the rate of the token embedding and the output layer, ``--muon-lr`` that of Muon's matrices. The
parameters of a group have the same update, rate and factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from gptpar.config import ModelConfig, OptimizerConfig
from gptpar.config.roles import Role
from gptpar.config.sections.optimizer import read_override
from gptpar.errors import ConfigError
from gptpar.model import mup
from gptpar.model.layer_spec import LayerSpec, build_on_meta
from gptpar.model.spec import ModelSpec
from gptpar.optim.group_ranges import Family, is_matrix
from gptpar.optim.optimizers import updates_of
from gptpar.optim.update import Hyperparameters
from gptpar.topology.placement import ParameterInfo


class GroupFactors(NamedTuple):
    """Multipliers of the scheduled learning rate and weight decay."""

    lr: float = 1.0
    weight_decay: float = 1.0
    is_decoupled: bool = False
    """Whether the learning rate is that of the token embedding and the output layer."""
    by_matrix: bool = False
    """Whether the update is one over matrices."""

    @property
    def launch(self) -> tuple[float, bool, bool]:
        """The key of a launch: groups of the same update and learning rate are updated together."""
        return self.lr, self.is_decoupled, self.by_matrix


class ParameterGroups:
    """The groups of a run, the same on every process.

    Args:
        optimizer: the run's flags.
        config: the model's.
        model: all layers of the model.

    Attributes:
        factors: by group. The first two groups exist in every run: matrices (decay) and the rest (no decay).
        updates: by group, with the run's settings.

    Raises:
        ConfigError: a pattern matches no parameter.
    """

    def __init__(self, optimizer: OptimizerConfig, config: ModelConfig, model: ModelSpec):
        self._model, self._optimizer = config, optimizer
        self._of_matrices, of_others = updates_of(optimizer)
        self._lr_overrides = [read_override(word) for word in optimizer.lr_override or ()]
        self._decay_overrides = [read_override(word) for word in optimizer.weight_decay_override or ()]
        self._blocks = frozenset(model.names(Role.BLOCK))
        decoupled = (*model.names(Role.EMBEDDING), *model.names(Role.LM_HEAD))
        self._decoupled = frozenset(decoupled if optimizer.decoupled_lr is not None else ())
        self.factors = [GroupFactors(), GroupFactors(weight_decay=0.0)]
        if any((self._lr_overrides, self._decay_overrides, config.mup, self._decoupled, self._of_matrices)):
            names = dict(_parameters(model.specs))
            self._require_matches(list(names))
            found = sorted({self._factors(name, num_dims) for name, num_dims in names.items()})
            self.factors += [one for one in found if one not in self.factors]
        self.updates = tuple((one.by_matrix and self._of_matrices) or of_others for one in self.factors)

    def group_of(self, name: str, info: ParameterInfo) -> int:
        """Number of a parameter's group."""
        return self.factors.index(self._factors(name, len(info.full_shape)))

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """The groups that one launch updates: those of one update and learning rate, with a decay and without."""
        groups: list[list[int]] = [[number] for number, one in enumerate(self.factors) if one.weight_decay]
        for number, one in enumerate(self.factors):
            if not one.weight_decay:
                family = next((family for family in groups if self.factors[family[0]].launch == one.launch), None)
                groups.append([number]) if family is None else family.append(number)
        return tuple(tuple(family) for family in groups)

    def hyperparameters(
        self,
        flags: OptimizerConfig,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        betas: tuple[float, float] | None = None,
    ) -> tuple[Hyperparameters, ...]:
        """A step's hyperparameters, by group.

        Args:
            lr, weight_decay: as the schedules say.
            decoupled_lr: of the token embedding and the output layer; ``None``: as ``lr``.
            betas: of the elementwise groups; ``None``: as the flags say.
        """
        rates = {False: lr, True: lr if decoupled_lr is None else decoupled_lr}
        own = {} if betas is None else dict(zip(("beta1", "beta2"), betas, strict=True))
        found = []
        for update, one in zip(self.updates, self.factors, strict=True):
            how = update.configured(flags, rates[one.is_decoupled] * one.lr, weight_decay * one.weight_decay)
            found.append(how if one.by_matrix else how._replace(**own))
        return tuple(found)

    def _factors(self, name: str, num_dims: int) -> GroupFactors:
        decays = is_matrix(name, num_dims)
        asks = self._model.mup or self._of_matrices
        in_block = any(name.startswith(f"{block}.") for block in self._blocks) if asks else False
        lr = _last_match(self._lr_overrides, name, 1.0)
        decay = _last_match(self._decay_overrides, name, 1.0 if decays else 0.0)
        is_decoupled = any(name.startswith(f"{layer}.") for layer in self._decoupled)
        by_matrix = self._of_matrices if in_block and decays else None
        growth = by_matrix.growth(mup.has_fixed_outputs(name)) if by_matrix else 1.0
        lr *= mup.learning_rate_multiplier(self._model, in_block, decays, growth)
        if by_matrix and self._optimizer.muon_lr is not None and self._optimizer.lr:
            lr *= self._optimizer.muon_lr / self._optimizer.lr
        return GroupFactors(lr, decay, is_decoupled, by_matrix is not None)

    def _require_matches(self, names: Sequence[str]) -> None:
        flags = {"--lr-override": self._lr_overrides, "--weight-decay-override": self._decay_overrides}
        problems = [
            f"{flag} {pattern}={factor:g} matches no parameter; names are like {names[0]}, {names[-1]}."
            for flag, overrides in flags.items()
            for pattern, factor in overrides
            if not any(fnmatchcase(name, pattern) for name in names)
        ]
        if problems:
            raise ConfigError(problems)


def _last_match(overrides: Sequence[tuple[str, float]], name: str, otherwise: float) -> float:
    return next((factor for pattern, factor in reversed(overrides) if fnmatchcase(name, pattern)), otherwise)


def _parameters(specs: Sequence[LayerSpec]) -> Iterator[tuple[str, int]]:
    """(global name, number of dimensions) of each parameter; of equal layers, one is built."""
    built: list[tuple[LayerSpec, list[tuple[str, int]]]] = []
    for spec in specs:
        inner = next((found for equal, found in built if equal.builds_the_same(spec)), None)
        if inner is None:
            inner = [(name, parameter.dim()) for name, parameter in build_on_meta(spec).named_parameters()]
            built.append((spec, inner))
        yield from ((f"{spec.name}.{name}", num_dims) for name, num_dims in inner)
