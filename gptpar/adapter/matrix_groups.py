"""Divides parameter groups into those that Muon updates and the others, as DeepSpeed does with its type ``Muon``.

A parameter may say it itself by the attribute ``use_muon``. Of the others, matrices whose names do not hold ``embed``
or ``lm_head`` are Muon's. A group's key ``use_muon`` says what its parameters are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import nn

from gptpar.config.sections.optimizer import OptimizerOptions
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.optimizers import updates_of
from gptpar.optim.update import Hyperparameters, Update

USE_MUON = "use_muon"
"""Key of a group, and attribute of a parameter; the name is DeepSpeed's."""
OTHERS = ("embed", "lm_head")
MATRIX_DIMS = (2, 3)
"""Dims of a matrix, and of several matrices in one parameter."""


class MatrixOptions(NamedTuple):
    """The update of matrices, and the default hyperparameters of their groups."""

    update: MatrixUpdate
    hyperparameters: Hyperparameters

    @classmethod
    def of(cls, flags: OptimizerOptions, lr: float) -> Self | None:
        """A configuration's; ``None``: its optimizer is elementwise."""
        update, _ = updates_of(flags)
        return None if update is None else cls(update, update.configured(flags, lr, flags.weight_decay))


def updates_by_group(
    groups: Sequence[Mapping[str, Any]], of_matrices: MatrixOptions | None, of_others: ElementwiseOptimizer
) -> tuple[Update, ...]:
    """The update of each group."""
    return tuple(of_matrices.update if of_matrices and group.get(USE_MUON) else of_others for group in groups)


def divided(
    groups: Sequence[dict[str, Any]], of_matrices: MatrixOptions, of_others: dict[str, Any], model: nn.Module
) -> tuple[list[dict[str, Any]], list[str]]:
    """(for each group, that of its matrices and that of its other parameters, if there are any; problems).

    Args:
        of_others: the other groups' default hyperparameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    defaults = {True: of_matrices.update.group_of(of_matrices.hyperparameters), False: of_others}
    found = []
    for group in groups:
        for by_matrix in (True, False):
            params = [p for p in group["params"] if _is_muons(p, names.get(p, ""), group.get(USE_MUON)) is by_matrix]
            if params or (not by_matrix and not group["params"]):
                found.append({**defaults[by_matrix], **group, "params": params, USE_MUON: by_matrix})
    return found, list(_problems(found, names))


def _is_muons(parameter: nn.Parameter, name: str, of_group: bool | None) -> bool:
    said = getattr(parameter, USE_MUON, of_group)
    if said is not None:
        return bool(said)
    return parameter.dim() in MATRIX_DIMS and not any(word in name.lower() for word in OTHERS)


def _problems(groups: Sequence[Mapping[str, Any]], names: Mapping[nn.Parameter, str]) -> Iterator[str]:
    """Parameters that are no matrices and are to be treated as such."""
    for parameter in (p for group in groups if group[USE_MUON] for p in group["params"]):
        if parameter.dim() not in MATRIX_DIMS:
            yield (
                f"{names.get(parameter, 'a parameter')} has the shape {tuple(parameter.shape)} and {USE_MUON}: Muon "
                f"updates matrices, and parameters of three dims as several matrices: set {USE_MUON} to False."
            )
