"""The rows of DeepSpeed's optimizers in the table of its keys (:mod:`gptpar.config.deepspeed_table`)."""

from __future__ import annotations

from typing import Any

from gptpar.config.deepspeed_rules import OFF, Key, NoEffect, Only, Sets, betas, number, truth

ADAM, MUON = ("adam", "adamw"), ("muon",)
OPTIMIZERS = (*ADAM, "lion", *MUON)

FP32_STATE = "master weights, moments and gradient sums are always fp32: leave it out"
_FALSE = (False,)
_MUONS = (
    "optimizer.muon_coefficient_type optimizer.muon_num_ns_steps optimizer.muon_scale_mode "
    "optimizer.muon_extra_scale_factor optimizer.muon_nesterov"
)
_AS_DEEPSPEED = ("simple", 5, "shape_scaling", 1.0, True)
"""The settings of DeepSpeed's Muon, which its file cannot change."""


def _optimizer(kind: str) -> list[Any]:
    """The optimizer's name, and the settings of Muon."""
    name = kind.lower()
    settings = _AS_DEEPSPEED if name in MUON else [OFF] * len(_AS_DEEPSPEED)
    return [name if name in ("lion", *MUON) else "adam", *settings]


def _per_head(value: Any) -> object:
    return "heads" if truth(value) else OFF


# fmt: off
_DECAY, _BETAS = "optimizer.weight_decay", "optimizer.adam_beta1 optimizer.adam_beta2"
OPTIMIZER = (
    Key("optimizer.type", Sets(_optimizer, f"optimizer.optimizer {_MUONS}")),
    Key("optimizer.params.lr", Sets(number, "optimizer.lr"), of=(*ADAM, "lion")),
    Key("optimizer.params.lr", Sets(number, "optimizer.lr optimizer.muon_lr"), of=MUON),
    Key("optimizer.params.adam_lr", Sets(number, "optimizer.lr"), of=MUON),
    Key("optimizer.params.muon_lr", Sets(number, "optimizer.muon_lr"), of=MUON),
    Key("optimizer.params.momentum", Sets(number, "optimizer.muon_momentum"), of=MUON),
    Key("optimizer.params.ns_method", Only(("gram", "standard"), "both iterate the same polynomial"), of=MUON),
    Key("optimizer.params.per_head_muon", Sets(_per_head, "optimizer.muon_qkv"), of=MUON),
    Key("optimizer.params.betas", Sets(betas, _BETAS), of=ADAM),
    Key("optimizer.params.betas", Sets(betas, _BETAS), default=[0.9, 0.95], of=MUON),
    Key("optimizer.params.eps", Sets(number, "optimizer.adam_eps"), default=1e-10, of=MUON),
    Key("optimizer.params.betas", Sets(betas, "optimizer.lion_beta1 optimizer.lion_beta2"), of=("lion",)),
    Key("optimizer.params.eps", Sets(number, "optimizer.adam_eps"), of=ADAM),
    Key("optimizer.params.weight_decay", Sets(number, _DECAY, "of matrices, not of biases and norms"), Sets(number,
        _DECAY, "of every parameter whose group says no other"), default=0.0),
    Key("optimizer.params.max_grad_norm", Sets(number, "optimizer.clip_grad")),
    Key("optimizer.params.adam_w_mode", Sets(truth), of=ADAM),
    Key("optimizer.params.torch_adam", NoEffect("the fused kernels are chosen here"), of=ADAM),
    Key("optimizer.params.amsgrad", Only(_FALSE, "a GPT has no AMSGrad: leave it out"), Sets(truth), of=ADAM),
    Key("optimizer.params.bias_correction", Sets(truth, "optimizer.adam_bias_correction"), of=ADAM),
    Key("optimizer.params.fp32_optimizer_states", Only((True,), FP32_STATE)),
)
# fmt: on
