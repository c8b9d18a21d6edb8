"""The MLP's activation functions and gates by their names in ``--mlp-activation``, with their gradients.

Legend: N tokens, F this rank's part of the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gptpar.kernels.gate import swiglu

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


def gated(
    name: str, up: torch.Tensor, limit: float | None = None, offset: float = 0.0, *, again: bool = False
) -> torch.Tensor:
    """One half of an MLP's first product, multiplied by a function of the other half (Shazeer 2020).

    Args:
        limit: bound of the gate's input from above, and of the other half's absolute value.
        offset: is added to the other half.
        again: whether the backward pass recomputes this. If so, plain operators do it: in a compiled block torch 2.11
            keeps the output of a function with its own backward.
    """
    if name == "swiglu" and limit is None and not offset and not again:
        return swiglu(up)
    gate_NF, value_NF = up.chunk(2, dim=-1)
    if limit is not None:
        gate_NF, value_NF = gate_NF.clamp(max=limit), value_NF.clamp(-limit, limit)
    return FUNCTIONS[name][0](gate_NF) * (value_NF + offset if offset else value_NF)
