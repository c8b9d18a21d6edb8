"""``Outcome``: a training's losses, gradients and weights as whole tensors, which check-layouts compares."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """The outcome of a training as whole tensors, on the main process.

    Attributes:
        steps: (loss, gradient norm, auxiliary losses) of each step.
        gradients: of each step.
    """

    initial: Tensors = field(default_factory=dict)
    steps: list[tuple[float, ...]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
