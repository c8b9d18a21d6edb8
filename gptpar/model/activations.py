"""The MLP's activation functions and gates by their names in ``--mlp-activation``, with their gradients.

Legend: N tokens, F this rank's part of the MLP's width; ``up`` is [N, 2F] with a gate, gates first, else [N, F].
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.nn.functional as F

from gptpar.kernels import gpu

aten = torch.ops.aten
Unary = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

QUICK_SLOPE = 1.702
"""x * sigmoid(1.702 x) approximates GELU (Hendrycks and Gimpel 2016)."""


def _quick_slope_of(x: torch.Tensor) -> torch.Tensor:
    share = (QUICK_SLOPE * x).sigmoid()
    return share * (1 + QUICK_SLOPE * x * (1 - share))


FUNCTIONS: dict[str, tuple[Unary, Backward]] = {
    "swiglu": (F.silu, aten.silu_backward),
    "geglu": (F.gelu, aten.gelu_backward),
    "geglu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "quick_geglu": (lambda x: x * (QUICK_SLOPE * x).sigmoid(), lambda grad, x: grad * _quick_slope_of(x)),
    "reglu": (F.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
    "liglu": (lambda x: x, lambda grad, x: grad),
    "squared_relu": (lambda x: F.relu(x).square(), lambda grad, x: grad * (2 * F.relu(x))),
}
FUNCTIONS |= {"gelu": FUNCTIONS["geglu"], "gelu_tanh": FUNCTIONS["geglu_tanh"]}
"""Name in ``--mlp-activation`` -> function, and its gradient from (the output's gradient, the input)."""


def gated(name: str, up: torch.Tensor, limit: float = inf, offset: float = 0.0, *, again: bool = False) -> torch.Tensor:
    """One half of an MLP's first product, multiplied by a function of the other half (Shazeer 2020).

    Args:
        limit: bound of the gate's input from above, and of the other half's absolute value.
        offset: is added to the other half.
        again: whether the backward pass recomputes this. If so, plain operators do it: in a compiled block torch 2.11
            keeps the output of a function with its own backward.
    """
    if name == "swiglu" and limit == inf and not offset and not again:
        return _Swiglu.apply(up)
    return _plain(up, name, True, limit, offset)


def activated(up: torch.Tensor, name: str, gated: bool, limit: float, offset: float) -> torch.Tensor:
    """The activation function's output [N, F], or the gate's, in one pass on a GPU; without gradients."""
    return (gpu.gate.activate if gpu.takes(up) else _plain)(up, name, gated, limit, offset)


def backward_again(
    grad_NF: torch.Tensor, up: torch.Tensor, name: str, gated: bool, limit: float, offset: float
) -> torch.Tensor:
    """The gradient of :func:`activated`'s input; its output is computed again, and takes the place of ``grad_NF``."""
    if gpu.takes(up):
        return gpu.gate.backward_again(grad_NF, up, name, gated, limit, offset)
    grad_up = _plain_backward(grad_NF, up, name, gated, limit, offset)
    grad_NF.copy_(_plain(up, name, gated, limit, offset))
    return grad_up


def _plain(up: torch.Tensor, name: str, gated: bool, limit: float, offset: float) -> torch.Tensor:
    if not gated:
        return FUNCTIONS[name][0](up)
    gate_NF, factor_NF = _halves(up, limit, offset)
    return FUNCTIONS[name][0](gate_NF) * factor_NF


def _plain_backward(
    grad_NF: torch.Tensor, up: torch.Tensor, name: str, gated: bool, limit: float, offset: float
) -> torch.Tensor:
    function, backward = FUNCTIONS[name]
    if not gated:
        return backward(grad_NF, up)
    gate_NF, factor_NF = _halves(up, limit, offset)
    grad_up = torch.cat([backward(grad_NF * factor_NF, gate_NF), grad_NF * function(gate_NF)], dim=-1)
    if limit < inf:
        for grad, x, low in zip(grad_up.chunk(2, dim=-1), up.chunk(2, dim=-1), (-inf, -limit), strict=True):
            grad.masked_fill_((x > limit) | (x < low), 0)
    return grad_up


def _halves(up: torch.Tensor, limit: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate's input, and what its function is multiplied by."""
    gate_NF, value_NF = up.chunk(2, dim=-1)
    if limit < inf:
        gate_NF, value_NF = gate_NF.clamp(max=limit), value_NF.clamp(-limit, limit)
    return gate_NF, value_NF + offset if offset else value_NF


class _Swiglu(torch.autograd.Function):
    """Its backward pass reads and writes each number once.

    torch's compiler fuses both halves of the gradient into one output, and computes each element from all three inputs:
    it reads them twice.
    """

    @staticmethod
    def forward(ctx: Any, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(up)
        return _plain(up, "swiglu", True, inf, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (up,) = ctx.saved_tensors
        return (gpu.gate.backward if gpu.takes(up) else _plain_backward)(grad_NF, up, "swiglu", True, inf, 0.0)
