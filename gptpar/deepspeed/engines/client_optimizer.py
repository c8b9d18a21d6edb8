"""Takes the parameters to train, their groups and hyperparameters from the user's optimizer or the configuration.

A client's optimizer has precedence over the configuration's. The engine takes over its parameter groups, and updates
them itself, by the update of the client's optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from gptpar.adapter import torch_optimizers
from gptpar.adapter.matrix_groups import divided
from gptpar.adapter.options import EngineOptions
from gptpar.errors import ConfigError
from gptpar.offload.local_parameters import problems_of_hyperparameters, tensors_of

Group: TypeAlias = dict[str, Any]
ClientOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None

MAX_NAMED = 4
"""A sentence names at most this many parameters, and gives the number of the others."""


def groups_of(
    optimizer: ClientOptimizer,
    model_parameters: Iterable[Any] | None,
    model: nn.Module,
    options: EngineOptions,
    *,
    may_be_empty: bool = False,
) -> tuple[list[Group], EngineOptions]:
    """(the parameter groups, the options with the update of their elements).

    A group has ``params`` (a list), the optimizer's hyperparameters, and further keys that users add. Groups are the
    client's own dictionaries: a scheduler over the client's optimizer, which holds the same ones, changes the learning
    rates here. Frozen parameters stay in the groups that name them. Trainable ones that no group names are not trained,
    as in DeepSpeed, and a warning names them. Without any optimizer there is one empty group.

    Args:
        optimizer: the client's, which has not stepped, or a function (or class) that makes one of parameters.
        model_parameters: parameters, (name, parameter) pairs or groups; default: all trainable ones of the model. An
            existing optimizer has its own parameters.
        model: the module.
        options: its ``optimizer`` counts if the client passes none.
        may_be_empty: whether there may be no trainable parameter, as in a pipeline's stage.

    Raises:
        ConfigError: something does not fit; it names everything.
    """
    given = _listed(model_parameters, model)
    if optimizer is None and options.optimizer is None and options.torch_optimizer is None:
        if options.zero_stage in (1, 2):
            raise ConfigError([_NO_OPTIMIZER.format(options.zero_stage)])
        defaults = options.update.group_of(options.update.unchanging)
        return [{**defaults, "params": []}], replace(options, has_optimizer=False)
    client = options.torch_optimizer if optimizer is None else optimizer
    if client is not None and not isinstance(client, torch.optim.Optimizer):
        if not callable(client):
            raise ConfigError([f"optimizer is of type {type(client).__name__}: {_USE_TORCHS}."])
        client = client(given or [{"params": []}])
    if client is None:
        groups, problems = _grouped(given, options, model)
    elif isinstance(client, torch.optim.Optimizer):
        groups, problems = client.param_groups, list(torch_optimizers.problems(client))
        if not problems:
            options = replace(options, **torch_optimizers.update_options(client))
    else:
        raise ConfigError([f"the function optimizer returns what is of type {type(client).__name__}: {_USE_TORCHS}."])
    problems += [*_parameter_problems(groups, model, may_be_empty), *problems_of_hyperparameters(groups)]
    if problems:
        raise ConfigError(problems)
    _warn_of_others(groups, model)
    return groups, options


_USE_TORCHS = f"pass an optimizer of torch ({torch_optimizers.NAMES}), or none and the configuration's optimizer"

_NO_OPTIMIZER = (
    'there is no optimizer: add {{"optimizer": {{"type": "AdamW"}}}} to the configuration, or pass optimizer=. An '
    "engine for forward passes alone needs none at ZeRO stage 0 or 3, and this is stage {}."
)


def _listed(params: Any, model: nn.Module) -> list[Any]:
    """Parameters, or groups of them, whose ``params`` become lists; without names."""
    if params is None:
        return [p for p in model.parameters() if p.requires_grad]
    given = [params] if isinstance(params, dict | torch.Tensor) else [*params]
    groups = {place: one for place, one in enumerate(given) if isinstance(one, dict)}
    if lacking := [place for place, group in groups.items() if not isinstance(group.get("params"), Iterable)]:
        raise ConfigError([f'model_parameters: group {place} has no list "params": add one.' for place in lacking])
    for group in groups.values():
        group["params"] = _nameless(tensors_of([group])[0][0]["params"])
    return _nameless(given)


def _nameless(entries: Sequence[Any]) -> list[Any]:
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _grouped(given: list[Any], options: EngineOptions, model: nn.Module) -> tuple[list[Group], list[str]]:
    """(groups with the configuration's hyperparameters as defaults, problems)"""
    groups = [item for item in given if isinstance(item, dict)]
    if groups and len(groups) != len(given):
        return [], ["model_parameters has groups and parameters side by side: make it one or the other."]
    assert options.optimizer is not None
    defaults = options.update.group_of(options.optimizer)
    groups = groups or [{"params": given}]
    if options.by_matrix is not None:
        return divided(groups, options.by_matrix, defaults, model)
    for group in groups:
        group |= {**defaults, **group}
    return groups, []


def _parameter_problems(groups: Sequence[Group], model: nn.Module, may_be_empty: bool) -> Iterator[str]:
    """Problems of groups that do not consist of the model's parameters, each once."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    places: dict[torch.Tensor, int] = {}
    foreign = []
    for place, group in enumerate(groups):
        for number, parameter in enumerate(group["params"]):
            if not isinstance(parameter, torch.Tensor) or parameter not in names:
                foreign.append(f"{_described(parameter)} (group {place}, place {number})")
            elif parameter in places:
                other = places[parameter]
                where = f"group {place} twice" if other == place else f"the groups {other} and {place}"
                yield f"{names[parameter]} is in {where}: name each parameter once."
            else:
                places[parameter] = place
    if foreign:
        yield f"not among the model's parameters: {_shortened(foreign)}: pass those of the model that is passed, too."
    if not (may_be_empty or any(parameter.requires_grad for parameter in places) or foreign) and groups:
        yield "there is no trainable parameter in the groups: set requires_grad before gptpar.initialize."


def _described(entry: Any) -> str:
    if isinstance(entry, torch.Tensor):
        return f"a tensor of shape {tuple(entry.shape)}"
    return f"an entry of type {type(entry).__name__}"


def _warn_of_others(groups: Sequence[Group], model: nn.Module) -> None:
    named = {parameter for group in groups for parameter in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and p not in named]
    if others:
        verb = "parameter is" if len(others) == 1 else "parameters are"
        warnings.warn(
            f"{len(others)} trainable {verb} in no group and will not be trained: {_shortened(others)}. Add a group, "
            "or set requires_grad to False.",
            stacklevel=3,
        )


def _shortened(names: Sequence[str]) -> str:
    left = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
