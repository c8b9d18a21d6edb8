"""The MLP in tiles of tokens: only one tile's inside exists at a time, in the forward and in the backward pass.

The input alone is kept; the backward pass computes each tile's inside again. Gradients of weights are summed over tiles
in fp32 or wider. The function is one operator, so that a compiler does not unroll the tiles.

Legend: n this rank's tokens, N all tokens of the tensor axis, D model width, U width of the first product on this rank,
F width of the second one's input there (U / 2 with a gate).
"""

from __future__ import annotations

from typing import Any

import torch

from gptpar.model.activated_product import activated_row_gradients
from gptpar.model.activations import activated
from gptpar.tensor_parallel.linear_ops import column_backward, column_forward, row_output
from gptpar.tensor_parallel.products import product


def num_tiles(tokens: int, tiles: int) -> int:
    """Number of tiles that have tokens."""
    return min(tokens, tiles)


def _first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, *how: Any) -> torch.Tensor:
    y = column_forward(x, weight, None if group else bias, group, *how)
    return y + bias if group and bias is not None else y


@torch.library.custom_op("gptpar::tiled_mlp", mutates_args=())
def tiled_mlp(
    x_nD: torch.Tensor,
    up_UD: torch.Tensor,
    bias_U: torch.Tensor | None,
    down_DF: torch.Tensor,
    activation: str,
    gated: bool,
    limit: float,
    offset: float,
    tiles: int,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
) -> torch.Tensor:
    """y_nD, without the second bias.

    Args:
        up_UD, bias_U: weight and bias of the first product.
        down_DF: weight of the second product.
        activation, gated, limit, offset: the function between them (:func:`~gptpar.model.activations.gated`), and
            whether it multiplies one half of its input by the other.
        tiles: number of tiles.
        group: name of the tensor axis's group; empty: this process is alone.
        sequence_parallel, fused, format: see :class:`~gptpar.tensor_parallel.layers.SplitLinear`.
    """
    how = group, sequence_parallel, fused, format
    y_nD = x_nD.new_empty(x_nD.shape[0], down_DF.shape[0])
    count = num_tiles(x_nD.shape[0], tiles)
    for x, y in zip(x_nD.tensor_split(count), y_nD.tensor_split(count), strict=True):
        inner = activated(_first(x, up_UD, bias_U, *how), activation, gated, limit, offset)
        if group:
            y.copy_(row_output(inner, down_DF, None, *how))
        else:
            product(inner, down_DF.t(), format, out=y)
    return y_nD


@torch.library.custom_op("gptpar::tiled_mlp_backward", mutates_args=())
def tiled_mlp_backward(
    grad_nD: torch.Tensor,
    x_nD: torch.Tensor,
    up_UD: torch.Tensor,
    bias_U: torch.Tensor | None,
    down_DF: torch.Tensor,
    activation: str,
    gated: bool,
    limit: float,
    offset: float,
    tiles: int,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of the first weight, of its bias (empty without one) and of the second weight."""
    how = group, sequence_parallel, fused, format
    wide = torch.promote_types(x_nD.dtype, torch.float32)
    grad_x_nD = torch.empty_like(x_nD, memory_format=torch.contiguous_format)
    count = num_tiles(x_nD.shape[0], tiles)
    sums = [torch.zeros_like(weight, dtype=wide) for weight in (up_UD, down_DF)]
    sum_U = x_nD.new_zeros(0 if bias_U is None else len(bias_U), dtype=wide)
    parts = zip(x_nD.tensor_split(count), grad_nD.tensor_split(count), grad_x_nD.tensor_split(count), strict=True)
    for x, grad, grad_x in parts:
        up = _first(x, up_UD, bias_U, *how)
        grad = grad.contiguous()
        grad_up, grad_down = activated_row_gradients(grad, up, down_DF, activation, gated, limit, offset, *how)
        sums[1] += grad_down
        del up, grad_down
        if bias_U is not None:
            sum_U += grad_up.sum(0, dtype=wide)
        if group:
            grad_tile, grad_weight = column_backward(grad_up, x, up_UD, *how)
            grad_x.copy_(grad_tile)
        else:
            product(grad_up, up_UD, format, out=grad_x)
            grad_weight = product(grad_up.t(), x, format)
        sums[0] += grad_weight
        del grad_up, grad_weight
    return grad_x_nD, sums[0].to(up_UD.dtype), sum_U.to(x_nD.dtype), sums[1].to(down_DF.dtype)


@tiled_mlp.register_fake
def _(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


@tiled_mlp_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    length = 0 if bias is None else bias.shape[0]
    return x.new_empty(x.shape), up.new_empty(up.shape), x.new_empty(length), down.new_empty(down.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, up, bias, down, *ctx.how = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, up, down, *([bias] if ctx.has_bias else []))


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, up, down, *bias = ctx.saved_tensors
    grad_x, grad_up, grad_bias, grad_down = tiled_mlp_backward(grad, x, up, bias[0] if bias else None, down, *ctx.how)
    return grad_x, grad_up, grad_bias if ctx.has_bias else None, grad_down, *[None] * len(ctx.how)


tiled_mlp.register_autograd(_gradients, setup_context=_save)
