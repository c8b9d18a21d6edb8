"""``deepspeed.ops.adam``: DeepSpeed's optimizers as torch's, whose groups ``initialize`` takes over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gptpar.errors import ConfigError


def _adam(params: Iterable[Any], bias_correction: bool, decoupled: bool, **hyperparameters: Any) -> torch.optim.Adam:
    if not bias_correction:
        raise ConfigError(["bias_correction=False: the update divides both moments by their bias; leave it out."])
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **hyperparameters)


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adam:
    """torch's AdamW, or its Adam without ``adamw_mode``; moments are always fp32.

    Whether the CPU updates its parameters is said by the configuration's ``offload_optimizer``.

    Raises:
        ConfigError: there is no ``bias_correction``.
    """
    given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    return _adam(model_params, bias_correction, adamw_mode, **given)


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Adam:
    """The same as :func:`DeepSpeedCPUAdam` by the name that DeepSpeed has for GPUs."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
