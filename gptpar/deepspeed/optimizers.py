"""``deepspeed.ops.adam``: DeepSpeed's optimizers as torch's, whose groups ``initialize`` takes over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.errors import ConfigError
from gptpar.optim.adam_update import AdamHyperparameters


class _Adam(type):
    """The type of DeepSpeed's Adam classes: calling one makes torch's optimizer; every Adam passes ``isinstance``."""

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, EngineOptimizer):
            return instance.updates[0].hyperparameters is AdamHyperparameters
        return isinstance(instance, torch.optim.Adam)


class DeepSpeedCPUAdam(metaclass=_Adam):
    """torch's AdamW, or its Adam without ``adamw_mode``.

    The configuration's ``offload_optimizer`` says whether the CPU updates its parameters. The engine's moments are
    fp32, whatever ``fp32_optimizer_states`` says. An optimizer that the program steps itself has torch's moments, in
    the parameters' number format.

    Raises:
        ConfigError: there is no ``bias_correction``.
    """

    def __new__(  # type: ignore[misc]
        cls,
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
        if not bias_correction:
            raise ConfigError(["bias_correction=False: the update divides both moments by their bias; leave it out."])
        kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
        return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class FusedAdam(metaclass=_Adam):
    """The same as :class:`DeepSpeedCPUAdam` by the name that DeepSpeed has for GPUs."""

    def __new__(  # type: ignore[misc]
        cls,
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
        return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
