"""Optimizers of ``torch.optim`` that the engine updates by itself: their update, and those that a configuration names.

An engine takes over such an optimizer's parameter groups, and has its states in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Muon

from gptpar.adapter.matrix_groups import USE_MUON, MatrixOptions
from gptpar.config.deepspeed_reader import part_of, without_auto
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.muon import EPS, MUON
from gptpar.optim.torch_updates import ADAGRAD, ADAM, AMSGRAD, AMSGRADW, rmsprop, sgd
from gptpar.optim.update import Update

Groups = Sequence[Mapping[str, Any]]

NAMES = "AdamW, Adam, SGD, Adagrad, RMSprop or Muon"
_OTHER_UPDATES = ("maximize", "differentiable")
"""Arguments of torch's optimizers that change their update; the engine supports none of them."""

_BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
TYPES = tuple(_BY_NAME)
"""Values of the configuration's ``optimizer.type`` that name an optimizer of torch, in small letters."""

_ENGINES_OWN = ("adam_w_mode", "torch_adam", "set_grad_none", "fp32_optimizer_states", "max_grad_norm")
"""Parameters of DeepSpeed's Adam that torch's has not, or that need not be passed on."""


def _of_adam(groups: Groups) -> ElementwiseOptimizer:
    coupled = any(group["weight_decay"] != 0 and not group.get("decoupled_weight_decay") for group in groups)
    if any(group.get("amsgrad") for group in groups):
        return AMSGRAD if coupled else AMSGRADW
    return ADAM if coupled else ADAMW


def _of_sgd(groups: Groups) -> ElementwiseOptimizer:
    return sgd(momentum=any(group["momentum"] != 0 for group in groups))


def _of_rmsprop(groups: Groups) -> ElementwiseOptimizer:
    momentum = any(group["momentum"] != 0 for group in groups)
    return rmsprop(momentum=momentum, centered=any(group["centered"] for group in groups))


_UPDATES: dict[type, tuple[Callable[[Groups], ElementwiseOptimizer], tuple[str, ...]]] = {
    torch.optim.AdamW: (_of_adam, ("amsgrad", "decoupled_weight_decay")),
    torch.optim.Adam: (_of_adam, ("amsgrad", "decoupled_weight_decay")),
    torch.optim.SGD: (_of_sgd, ()),
    torch.optim.Adagrad: (lambda groups: ADAGRAD, ("initial_accumulator_value",)),
    torch.optim.RMSprop: (_of_rmsprop, ("centered",)),
    Muon: (lambda groups: ADAMW, ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")),
}
"""Class -> (groups -> the elementwise update, hyperparameters that all groups share)."""
_MUONS_SCALES = {None: ("shape_scaling", 1.0), "original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}
"""Torch's ``adjust_lr_fn`` -> the scale of an update, and its further factor."""


def update_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options that say the update of a client's optimizer that has no :func:`problems`."""
    groups = optimizer.param_groups
    if not isinstance(optimizer, Muon):
        return {"update": _UPDATES[type(optimizer)][0](groups), "by_matrix": None}
    first = groups[0]
    scale, factor = _MUONS_SCALES[first["adjust_lr_fn"]]
    update = replace(
        MUON,
        nesterov=first["nesterov"],
        iterations=(tuple(first["ns_coefficients"]),) * first["ns_steps"],
        scale_mode=scale,
        factor=factor,
    )
    for group in groups:
        group[USE_MUON] = True
    return {"by_matrix": MatrixOptions(update, update.of_group(first))}


def problems(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Sentences about an optimizer that the engine cannot take over."""
    kind, groups = type(optimizer), optimizer.param_groups
    if kind not in _UPDATES:
        yield f"optimizer is of type {kind.__name__}: the engine has the updates of torch's {NAMES}: pass one of these."
        return
    for name in _UPDATES[kind][1]:
        if len({group.get(name) for group in groups}) > 1:
            values = ", ".join(str(group.get(name)) for group in groups)
            yield f"optimizer has {name} {values} in its groups, which share one update: make it the same in all."
    for place, group in enumerate(groups):
        for name in _OTHER_UPDATES:
            if group.get(name):
                yield f"optimizer has {name}=True in group {place}, which gptpar's updates do not have: leave it out."
        if group.get("eps") != EPS and kind is Muon:
            yield f"optimizer has eps={group['eps']} in group {place}, and gptpar's Muon has {EPS}: leave it out."
    # Adagrad has a state from the beginning, before step 1.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        yield (
            f"optimizer has taken steps: it has states of {len(optimizer.state)} parameters, which the engine would "
            "not take over; pass it before its first step, and resume by engine.load_checkpoint."
        )


def changed_beyond(update: Update, group: Mapping[str, Any]) -> str | None:
    """What a group was changed to that its update lacks; the groups' first values have chosen the update."""
    if update.name in ("sgd", "rmsprop") and group["momentum"] and "momentum_buffer" not in update.states:
        return f"momentum {group['momentum']}, and no group had one when the engine was made"
    if update in (ADAMW, AMSGRADW) and group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        return (
            f"weight_decay {group['weight_decay']} of torch.optim.Adam, and no group had one when the engine was made"
        )
    found = next((name for name in _OTHER_UPDATES if group.get(name)), None)
    return None if found is None else f"{found}=True, which gptpar's updates do not have"


def of_configuration(raw: Mapping[str, Any]) -> tuple[Callable[..., torch.optim.Optimizer] | None, list[str]]:
    """(a function from parameters to the optimizer of torch that a configuration names, if it names one; problems).

    As in DeepSpeed, ``params`` are the arguments of torch's class. ``Adam`` with ``"adam_w_mode": false`` and the
    AMSGrad variants are torch's, too.
    """
    section, given = part_of(raw, "optimizer"), dict(without_auto(part_of(raw, "optimizer", "params")))
    kind = str(section.get("type")).lower()
    made: Any = None
    if kind in _BY_NAME:
        made = partial(_BY_NAME[kind], **given)
    elif kind in ("adam", "adamw") and (given.get("amsgrad") is True or given.get("adam_w_mode") is False):
        coupled = kind == "adam" and given.get("adam_w_mode") is False
        params = {name: value for name, value in given.items() if name not in _ENGINES_OWN}
        if params.get("bias_correction") is True:
            del params["bias_correction"]
        made = partial(torch.optim.Adam if coupled else torch.optim.AdamW, **params)
    if made is None:
        return None, []
    try:
        made([torch.zeros(0)])
    except (TypeError, ValueError) as error:
        return None, [f"optimizer.params does not fit torch.optim.{made.func.__name__}: {error}."]
    return made, []
