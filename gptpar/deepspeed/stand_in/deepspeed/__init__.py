"""``import deepspeed`` under ``gptpar as-deepspeed``: the names of ``gptpar.deepspeed``."""

from __future__ import annotations

from typing import Any

import torch

from gptpar.deepspeed.places import found, serve
from gptpar.deepspeed.zero_parameters import ZeroParamStatus

serve(__name__)

# The parameter that a Function has saved is, in its backward, a tensor without the parameter's attributes, because
# saved tensors pass through the engine's hooks, which gather it. TRL's loss asks it for this one.
torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    return found(__name__, "", name)
