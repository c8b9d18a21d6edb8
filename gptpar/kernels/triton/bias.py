"""The kernels of :mod:`gptpar.kernels.bias_gradient`.

Each program processes a tile of columns and rows, and keeps the columns' sums in registers. It sums the rounded
gradients in fp32, in an order that depends on the shapes alone.

The kernels are registered as operators: torch.compile would otherwise fix the gradients' strides before it knows them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from gptpar.kernels.triton.gate import value_and_slope

NUM_PARTS = 256
"""Partial sums of each column: enough programs to fill a GPU."""


@triton.jit
def _activation_backward(
    grad, x, grad_x, sums, num_rows, num_columns, rows_a_part,
    NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, num_rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (columns < num_columns)[None, :]
        at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (g * value_and_slope(v, NAME)[1]).to(grad_x.dtype.element_ty)
        tl.store(grad_x + at, rounded, mask=inside)
        total += rounded.to(tl.float32)
    tl.store(sums + tl.program_id(1) * num_columns + columns, tl.sum(total, 0), mask=columns < num_columns)


@triton_op("gptpar::gelu_backward", mutates_args=())
def gelu_backward(grad_NF: torch.Tensor, x_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of x through GELU (tanh form), and its sum over N; for dtypes of at most 32 bits."""
    return _through_activation(grad_NF, x_NF, "gelu_tanh")


@triton_op("gptpar::squared_relu_backward", mutates_args=())
def squared_relu_backward(grad_NF: torch.Tensor, x_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of ``x``, gradient of the bias) through the squared ReLU."""
    return _through_activation(grad_NF, x_NF, "squared_relu")


def _through_activation(grad_NF: torch.Tensor, x_NF: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    grad_NF, x_NF = grad_NF.contiguous(), x_NF.contiguous()
    num_rows, num_columns = x_NF.shape
    grad_x_NF = torch.empty_like(x_NF)
    sums = torch.empty((NUM_PARTS, num_columns), dtype=torch.float32, device=x_NF.device)
    grid = (triton.cdiv(num_columns, 128), NUM_PARTS)
    rows_a_part = triton.cdiv(num_rows, NUM_PARTS)
    wrap_triton(_activation_backward)[grid](
        grad_NF, x_NF, grad_x_NF, sums, num_rows, num_columns, rows_a_part,
        NAME=name, ROWS=16, COLUMNS=128, num_warps=4,
    )  # fmt: skip
    return grad_x_NF, sums.sum(0).to(x_NF.dtype)


@triton.jit
def _merge_heads(
    q, k, v, merged, sums, num_rows, seq_length, width, rows_a_part,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    num_columns = tl.num_programs(0) * width
    group, part = head // (QUERIES + 2), head % (QUERIES + 2)
    if part < QUERIES:
        source, of_batch, of_token = q + (group * QUERIES + part).to(tl.int64) * q_h, q_b, q_s
    elif part == QUERIES:
        source, of_batch, of_token = k + group.to(tl.int64) * k_h, k_b, k_s
    else:
        source, of_batch, of_token = v + group.to(tl.int64) * v_h, v_b, v_s
    columns = tl.arange(0, COLUMNS)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, num_rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (columns < width)[None, :]
        begins = (rows // seq_length).to(tl.int64) * of_batch + (rows % seq_length).to(tl.int64) * of_token
        values = tl.load(source + begins[:, None] + columns[None, :], mask=inside, other=0.0)
        at = rows[:, None].to(tl.int64) * num_columns + head * width + columns[None, :]
        tl.store(merged + at, values, mask=inside)
        total += values.to(tl.float32)
    tl.store(sums + tl.program_id(1) * num_columns + head * width + columns, tl.sum(total, 0), mask=columns < width)


@triton_op("gptpar::merge_heads", mutates_args=())
def merge_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns qkv_(BS)(G(Q+2)K) of q_B(GQ)SK, k_BGSK and v_BGSK, and its sum over tokens; dtypes of at most 32 bits."""
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    batch, groups, seq_length, width = k.shape
    queries, num_rows = q.shape[1] // groups, batch * seq_length
    num_heads = groups * (queries + 2)
    merged = torch.empty((num_rows, num_heads * width), dtype=q.dtype, device=q.device)
    sums = torch.empty((NUM_PARTS, num_heads * width), dtype=torch.float32, device=q.device)
    wrap_triton(_merge_heads)[(num_heads, NUM_PARTS)](
        q, k, v, merged, sums, num_rows, seq_length, width, triton.cdiv(num_rows, NUM_PARTS),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        QUERIES=queries, ROWS=64, COLUMNS=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return merged, sums.sum(0).to(q.dtype)
