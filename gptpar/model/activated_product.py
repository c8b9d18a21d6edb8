"""An MLP's activation function and the row layer's product that reads it, as one operator that keeps its input alone.

The backward pass computes the function's output again in the pass over memory that forms the gradient of its input, so
that each number is read once. This pass reads the gradient of the product's input. The gradient of the product's weight
is computed afterwards, because it needs the function's output.

Legend: N all tokens, n this rank's, D model width, F this rank's part of the MLP's width; ``up`` is [N, 2F] with a
gate, else [N, F].
"""

from __future__ import annotations

from typing import Any

import torch

from gptpar.model.activations import activated, backward_again
from gptpar.tensor_parallel.linear_ops import (
    row_input_gradient,
    row_output,
    row_output_fake,
    weight_gradient,
    with_backward,
)


@torch.library.custom_op("gptpar::activated_row", mutates_args=())
def activated_row(
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    limit: float,
    offset: float,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """up, weight_DF, bias_D -> y_nD, summed over ranks.

    Args:
        activation, gated, limit, offset: see :func:`~gptpar.model.activations.gated`.
        bias: only if this process is alone on the tensor axis.
        group, sequence_parallel, fused, format, total, added: see :mod:`gptpar.tensor_parallel.linear_ops`.
    """
    inner_NF = activated(up, activation, gated, limit, offset)
    return row_output(inner_NF, weight, bias, group, sequence_parallel, fused, format)


@activated_row.register_fake
def _(up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    return row_output_fake(up, weight, *how[4:6])


def activated_row_gradients(
    grad_nD: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    activation: str,
    gated: bool,
    limit: float,
    offset: float,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``up`` and of the weight."""
    grad_ND, inner_NF = row_input_gradient(grad_nD, weight, group, sequence_parallel, fused, format)
    grad_up = backward_again(inner_NF, up, activation, gated, limit, offset)
    return grad_up, weight_gradient(grad_ND, inner_NF, weight, format, total)


with_backward(
    activated_row,
    "activated_row_backward",
    activated_row_gradients,
    "str activation, bool gated, float limit, float offset, ",
)
