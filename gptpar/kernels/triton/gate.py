"""The kernel of :mod:`gptpar.kernels.gate`: each program processes a tile of rows and columns of both halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

COLUMNS = 1024


@triton.jit
def _swiglu_backward(grad, up, grad_up, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    at = row * 2 * width + columns
    g = tl.load(grad + row * width + columns, mask=inside).to(tl.float32)
    gate = tl.load(up + at, mask=inside).to(tl.float32)
    value = tl.load(up + at + width, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = g * value * share * (1.0 + gate * (1.0 - share))
    tl.store(grad_up + at, of_gate.to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_up + at + width, (g * gate * share).to(grad_up.dtype.element_ty), mask=inside)


@triton_op("gptpar::swiglu_backward", mutates_args=())
def swiglu_backward(grad_NF: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[N, 2F] the gradient of both halves of ``up`` [N, 2F]; dtypes of at most 32 bits."""
    grad_NF, up = grad_NF.contiguous(), up.contiguous()
    rows, width = grad_NF.shape
    grad_up = torch.empty_like(up)
    if rows:
        grid = (rows, triton.cdiv(width, COLUMNS))
        wrap_triton(_swiglu_backward)[grid](grad_NF, up, grad_up, width, COLUMNS=COLUMNS, num_warps=4)
    return grad_up
