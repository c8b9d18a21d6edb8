"""The kernel of :mod:`gptpar.kernels.residual_norm`: a program processes whole rows, and sums their columns.

It loads the next rows before it processes the present ones, so that memory never waits for sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

NUM_PARTS = 264
"""Partial sums of each column: enough programs to fill a GPU, and a multiple of an H100's 132 multiprocessors."""
MIN_ELEMENTS = 2048
"""Elements that a program processes at a time, where a row has fewer."""
WIDEST = 8192
"""Maximum number of columns: a program keeps whole rows and their sums in registers."""


@triton.jit
def _rows(grad_y, grad_x, x, mean, rstd, rows, last, width, columns, PASSES: tl.constexpr):
    inside = (rows < last)[:, None] & (columns < width)[None, :]
    at = rows[:, None].to(tl.int64) * width + columns[None, :]
    dy = tl.load(grad_y + at, mask=inside, other=0.0)
    values = tl.load(x + at, mask=inside, other=0.0)
    passed = dy
    if PASSES:
        passed = tl.load(grad_x + at, mask=inside, other=0.0)
    m = tl.load(mean + rows, mask=rows < last, other=0.0)
    r = tl.load(rstd + rows, mask=rows < last, other=0.0)
    return dy, values, passed, m[:, None], r[:, None]


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_backward(
    grad_y, grad_x, x, mean, rstd, weight, grad, sums, num_rows, width, rows_a_part,
    PASSES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    first = part * rows_a_part
    last = tl.minimum(first + rows_a_part, num_rows)
    columns = tl.arange(0, COLUMNS)
    known = columns < width
    w = tl.load(weight + columns, mask=known, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_grad = tl.zeros((ROWS, COLUMNS), tl.float32)
    rows = first + tl.arange(0, ROWS)
    dy_next, x_next, passed_next, m_next, r_next = _rows(
        grad_y, grad_x, x, mean, rstd, rows, last, width, columns, PASSES
    )
    for _ in range(first, last, ROWS):
        dy, values, passed, m, r = dy_next.to(tl.float32), x_next.to(tl.float32), passed_next, m_next, r_next
        dy_next, x_next, passed_next, m_next, r_next = _rows(
            grad_y, grad_x, x, mean, rstd, rows + ROWS, last, width, columns, PASSES
        )
        inside = (rows < last)[:, None] & known[None, :]
        normed = tl.where(inside, (values - m) * r, 0.0)
        scaled = dy * w
        along, level = tl.reduce((scaled * normed, scaled), 1, _both)
        change = (scaled - level[:, None] / width - normed * (along[:, None] / width)) * r
        if PASSES:
            change += passed.to(tl.float32)
        rounded = change.to(grad.dtype.element_ty)
        tl.store(grad + rows[:, None].to(tl.int64) * width + columns[None, :], rounded, mask=inside)
        of_weight += dy * normed
        of_bias += dy
        of_grad += tl.where(inside, rounded.to(tl.float32), 0.0)
        rows += ROWS
    row = sums + part * width + columns
    step = tl.num_programs(0) * width
    tl.store(row, tl.sum(of_weight, 0), mask=known)
    tl.store(row + step, tl.sum(of_bias, 0), mask=known)
    tl.store(row + 2 * step, tl.sum(of_grad, 0), mask=known)


@triton_op("gptpar::norm_backward", mutates_args=())
def norm_backward(
    grad_y: torch.Tensor,
    grad_x: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`gptpar.kernels.residual_norm.backward`; at most 32 bits and ``WIDEST`` columns."""
    passed = x if grad_x is None else grad_x  # never read without a gradient
    grad_y, passed, x = (t.contiguous() for t in (grad_y, passed, x))
    num_rows, width = x.shape
    columns = triton.next_power_of_2(width)
    rows = max(1, MIN_ELEMENTS // columns)
    grad = torch.empty_like(x)
    sums = torch.empty((3, NUM_PARTS, width), dtype=torch.float32, device=x.device)
    wrap_triton(_norm_backward)[(NUM_PARTS,)](
        grad_y, passed, x, mean, rstd, weight, grad, sums, num_rows, width, triton.cdiv(num_rows, NUM_PARTS),
        PASSES=grad_x is not None, ROWS=rows, COLUMNS=columns, num_warps=rows * columns // 256,
    )  # fmt: skip
    return grad, sums.sum(1).to(weight.dtype)
