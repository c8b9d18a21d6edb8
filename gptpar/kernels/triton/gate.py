"""Activation functions of MLPs, and gates. Each program processes a part of a row; with a gate, of both its halves.

Everything is computed in fp32 and rounded once. Compiled functions pass ``limit`` and ``offset`` in fp64, which would
make everything that is computed with them fp64: kernels round them to fp32 first. A gate without a limit makes no
comparison.
"""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

COLUMNS = 1024


@triton.jit
def value_and_slope(x, NAME: tl.constexpr):
    """(f(x), f'(x)) in fp32, by the names of :data:`gptpar.model.activations.FUNCTIONS`."""
    if NAME == "swiglu":
        share = tl.sigmoid(x)
        return x * share, share * (1.0 + x * (1.0 - share))
    elif NAME == "quick_geglu":
        share = tl.sigmoid(1.702 * x)
        return x * share, share * (1.0 + 1.702 * x * (1.0 - share))
    elif NAME == "gelu_tanh" or NAME == "geglu_tanh":  # x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * share, share + x * share * (1.0 - share) * (1.5957691216057308 + 0.2140644488178007 * x * x)
    elif NAME == "gelu" or NAME == "geglu":
        share = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "reglu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "squared_relu":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive, 2.0 * positive
    else:
        tl.static_assert(NAME == "liglu")
        return x, tl.zeros_like(x) + 1.0


@triton.jit
def _clamped(x, other, limit):
    return tl.where(x > limit, limit, x), tl.where(other > limit, limit, tl.where(other < -limit, -limit, other))


@triton.jit
def _activate(
    up, inner, width, limit, offset,
    NAME: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    at = row * (2 * width if GATED else width) + columns
    x = tl.load(up + at, mask=inside).to(tl.float32)
    if GATED:
        other = tl.load(up + at + width, mask=inside).to(tl.float32)
        if CLAMPED:
            x, other = _clamped(x, other, tl.cast(limit, tl.float32))
        y = value_and_slope(x, NAME)[0] * (other + tl.cast(offset, tl.float32))
    else:
        y = value_and_slope(x, NAME)[0]
    tl.store(inner + row * width + columns, y.to(inner.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, up, grad_up, width, limit, offset,
    NAME: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, AGAIN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    at = row * (2 * width if GATED else width) + columns
    g = tl.load(grad + row * width + columns, mask=inside).to(tl.float32)
    x = tl.load(up + at, mask=inside).to(tl.float32)
    if GATED:
        other = tl.load(up + at + width, mask=inside).to(tl.float32)
        if CLAMPED:
            limit = tl.cast(limit, tl.float32)
            is_above, is_outside = x > limit, (other > limit) | (other < -limit)
            x, other = _clamped(x, other, limit)
        factor = other + tl.cast(offset, tl.float32)
        y, slope = value_and_slope(x, NAME)
        of_x, of_other = g * factor * slope, g * y
        if CLAMPED:
            of_x, of_other = tl.where(is_above, 0.0, of_x), tl.where(is_outside, 0.0, of_other)
        tl.store(grad_up + at + width, of_other.to(grad_up.dtype.element_ty), mask=inside)
        y *= factor
    else:
        y, slope = value_and_slope(x, NAME)
        of_x = g * slope
    tl.store(grad_up + at, of_x.to(grad_up.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(grad + row * width + columns, y.to(grad.dtype.element_ty), mask=inside)


@triton_op("gptpar::activation_backward", mutates_args=())
def backward(
    grad_NF: torch.Tensor, up: torch.Tensor, name: str, gated: bool, limit: float, offset: float
) -> torch.Tensor:
    """The gradient of ``up``, [N, 2F] with a gate, else [N, F]; dtypes of at most 32 bits."""
    grad_NF, up = grad_NF.contiguous(), up.contiguous()
    grad_up = torch.empty_like(up)
    if up.numel():
        how = {"NAME": name, "GATED": gated, "CLAMPED": limit < inf, "AGAIN": False, "COLUMNS": COLUMNS, "num_warps": 4}
        wrap_triton(_backward)[_grid(grad_NF)](grad_NF, up, grad_up, grad_NF.shape[1], limit, offset, **how)
    return grad_up


def backward_again(
    grad_NF: torch.Tensor, up: torch.Tensor, name: str, gated: bool, limit: float, offset: float
) -> torch.Tensor:
    """:func:`backward`, which also writes the activation function's output in the place of its gradient ``grad_NF``."""
    grad_up = torch.empty_like(up)
    if up.numel():
        how = {"NAME": name, "GATED": gated, "CLAMPED": limit < inf, "AGAIN": True, "COLUMNS": COLUMNS, "num_warps": 4}
        _backward[_grid(grad_NF)](grad_NF, up, grad_up, grad_NF.shape[1], limit, offset, **how)
    return grad_up


def activate(up: torch.Tensor, name: str, gated: bool, limit: float, offset: float) -> torch.Tensor:
    """The activation function's output [N, F]; dtypes of at most 32 bits."""
    inner_NF = up.new_empty(up.shape[0], up.shape[1] // 2 if gated else up.shape[1])
    if up.numel():
        how = {"NAME": name, "GATED": gated, "CLAMPED": limit < inf, "COLUMNS": COLUMNS, "num_warps": 4}
        _activate[_grid(inner_NF)](up, inner_NF, inner_NF.shape[1], limit, offset, **how)
    return inner_NF


def _grid(inner_NF: torch.Tensor) -> tuple[int, int]:
    return len(inner_NF), triton.cdiv(inner_NF.shape[1], COLUMNS)
