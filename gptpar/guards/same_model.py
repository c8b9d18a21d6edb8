"""Checks that all processes pass the same model and the same optimizer to ``gptpar.initialize``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from gptpar.errors import ModelError
from gptpar.topology.agreement import require_same


def require_same_model(
    model: nn.Module, groups: Sequence[dict[str, Any]], processes: dist.ProcessGroup | None = None
) -> None:
    """Check that all processes train the same parameters with the same hyperparameters; all call this together.

    Args:
        groups: of the optimizer.
        processes: those that hold the same parameters; ``None``: all.

    Raises:
        ModelError: on each of them: parameters differ in name, order, shape, dtype or ``requires_grad``, or groups in
            their parameters or in a plain value.
    """
    facts, names = {}, {}
    for number, (name, p) in enumerate(model.named_parameters()):
        trained = "trained" if p.requires_grad else "frozen"
        facts[f"parameter {number}"] = f"{name} ({list(p.shape)}, {str(p.dtype).removeprefix('torch.')}, {trained})"
        names[p] = str(number)
    for number, group in enumerate(groups):
        plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}
        facts |= {f"{key} of parameter group {number}": str(value) for key, value in plain.items()}
        facts[f"parameter group {number}"] = "parameters " + " ".join(names[p] for p in group["params"])
    require_same(facts, "all processes have to build the same model and optimizer.", processes, ModelError)
