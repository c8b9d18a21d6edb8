"""The kernels of :mod:`gptpar.kernels.head_norm`.

Forward, a program processes some heads of a token or of several. Backward, it processes some rows of one head, and sums
their columns; it loads the next rows before it processes the present ones, so that memory never waits for sums. The
norms' statistics are computed again from the head that the program reads. Sums are taken in fp32, those of the output's
gradient from its rounded values, in an order that depends on the shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

NUM_PROGRAMS = 2112
"""About the number of programs of a backward launch: several for each place on a GPU, as those of values end sooner."""
ELEMENTS, NUM_WARPS, FORWARD_WARPS = 2048, 4, 2
"""Elements that a program processes at a time; warps of a program in the backward and in the forward pass."""
WIDEST = 1024
"""Maximum width of a head: a program keeps whole rows of it in registers."""


@triton.jit
def _normed_heads(
    qkv, query_weight, query_bias, key_weight, key_bias, q, k, num_heads, width,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of a query or key, group by group, token by token
    group, part = (number // (QUERIES + 1)).to(tl.int64), number % (QUERIES + 1)
    columns = tl.arange(0, COLUMNS)
    known, is_key = columns < width, (part == QUERIES)[:, None]
    inside = (number < num_heads)[:, None] & known[None, :]
    values = tl.load(qkv + ((group * HEADS + part) * width)[:, None] + columns[None, :], mask=inside, other=0.0)
    x = values.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 1)[:, None] / width, 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + EPS)
    of_queries = tl.load(query_weight + columns, mask=known, other=0.0).to(tl.float32)[None, :]
    of_keys = tl.load(key_weight + columns, mask=known, other=0.0).to(tl.float32)[None, :]
    y = x * r * tl.where(is_key, of_keys, of_queries)
    if CENTRED:
        of_queries = tl.load(query_bias + columns, mask=known, other=0.0).to(tl.float32)[None, :]
        of_keys = tl.load(key_bias + columns, mask=known, other=0.0).to(tl.float32)[None, :]
        y += tl.where(is_key, of_keys, of_queries)
    y = y.to(q.dtype.element_ty)
    tl.store(q + ((group * QUERIES + part) * width)[:, None] + columns[None, :], y, mask=inside & ~is_key)
    tl.store(k + (group * width)[:, None] + columns[None, :], y, mask=inside & is_key)


@triton_op("gptpar::head_norms", mutates_args=())
def head_norms(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    query_bias: torch.Tensor | None,
    key_weight: torch.Tensor,
    key_bias: torch.Tensor | None,
    seq_length: int,
    queries: int,
    gated: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised queries [B, S, G Q, K] and keys [B, S, G, K]; at most 32 bits and ``WIDEST`` columns a head.

    Args:
        qkv, seq_length, queries, gated: see :mod:`gptpar.kernels.head_norm`.
        query_bias, key_bias: LayerNorm's biases; ``None``: RMSNorm.
    """
    qkv, width = qkv.contiguous(), len(query_weight)
    heads = queries + 2 + (queries if gated else 0)
    groups, columns = qkv.shape[1] // (heads * width), triton.next_power_of_2(width)
    num_heads, rows = len(qkv) * groups * (queries + 1), ELEMENTS // columns
    shape = (len(qkv) // seq_length, seq_length)
    q, k = qkv.new_empty((*shape, groups * queries, width)), qkv.new_empty((*shape, groups, width))
    wrap_triton(_normed_heads)[(triton.cdiv(num_heads, rows),)](
        qkv, query_weight, query_weight if query_bias is None else query_bias,
        key_weight, key_weight if key_bias is None else key_bias, q, k, num_heads, width,
        QUERIES=queries, HEADS=heads, EPS=eps, CENTRED=query_bias is not None,
        ROWS=rows, COLUMNS=columns, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return q, k


@triton.jit
def _begins(rows, seq_length, of_batch, of_token):
    at = (rows // seq_length).to(tl.int64) * of_batch + (rows % seq_length).to(tl.int64) * of_token
    return at[:, None]


@triton.jit
def _copied_head(
    grad, of_batch, of_token, merged, sums, first, last, seq_length, width, num_columns,
    NUM_SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    known = columns < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & known[None, :]
        begins = _begins(rows, seq_length, of_batch, of_token)
        values = tl.load(grad + begins + columns[None, :], mask=inside, other=0.0)
        tl.store(merged + rows[:, None].to(tl.int64) * num_columns + columns[None, :], values, mask=inside)
        total += values.to(tl.float32)
    tl.store(sums + columns, tl.sum(total, 0), mask=known)
    for n in tl.static_range(1, NUM_SUMS):
        tl.store(sums + n * num_columns + columns, tl.zeros((COLUMNS,), tl.float32), mask=known)


@triton.jit
def _head_rows(grad, of_batch, of_token, x, rows, last, seq_length, num_columns, columns, known):
    inside = (rows < last)[:, None] & known[None, :]
    dy = tl.load(grad + _begins(rows, seq_length, of_batch, of_token) + columns[None, :], mask=inside, other=0.0)
    values = tl.load(x + rows[:, None].to(tl.int64) * num_columns + columns[None, :], mask=inside, other=0.0)
    return dy, values


@triton.jit
def _normed_head(
    grad, of_batch, of_token, x, weight, merged, sums, first, last, seq_length, width, num_columns,
    EPS: tl.constexpr, NUM_SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    known = columns < width
    w = tl.load(weight + columns, mask=known, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    rows = first + tl.arange(0, ROWS)
    dy_next, x_next = _head_rows(grad, of_batch, of_token, x, rows, last, seq_length, num_columns, columns, known)
    for _ in range(first, last, ROWS):
        dy, values = dy_next.to(tl.float32), x_next.to(tl.float32)
        dy_next, x_next = _head_rows(
            grad, of_batch, of_token, x, rows + ROWS, last, seq_length, num_columns, columns, known
        )
        inside = (rows < last)[:, None] & known[None, :]
        scaled = dy * w
        if NUM_SUMS == 3:  # LayerNorm subtracts the mean, here and from the gradient below
            values = tl.where(inside, values - tl.sum(values, 1)[:, None] / width, 0.0)
        r = tl.rsqrt(tl.sum(values * values, 1)[:, None] / width + EPS)
        normed = values * r
        change = scaled - normed * (tl.sum(scaled * normed, 1)[:, None] / width)
        if NUM_SUMS == 3:
            change -= tl.sum(scaled, 1)[:, None] / width
            of_bias += dy
        rounded = (change * r).to(merged.dtype.element_ty)
        tl.store(merged + rows[:, None].to(tl.int64) * num_columns + columns[None, :], rounded, mask=inside)
        total += tl.where(inside, rounded.to(tl.float32), 0.0)
        of_weight += dy * normed
        rows += ROWS
    tl.store(sums + columns, tl.sum(total, 0), mask=known)
    tl.store(sums + num_columns + columns, tl.sum(of_weight, 0), mask=known)
    if NUM_SUMS == 3:
        tl.store(sums + 2 * num_columns + columns, tl.sum(of_bias, 0), mask=known)


@triton.jit
def _head_norms_backward(
    q, k, v, gate, qkv, query_weight, key_weight, merged, sums, num_rows, seq_length, width, rows_a_part,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, NUM_SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    num_columns = tl.num_programs(0) * width
    group, part = (head // HEADS).to(tl.int64), head % HEADS
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, num_rows)
    x, out = qkv + head * width, merged + head * width
    its_sums = sums + (tl.program_id(1) * NUM_SUMS * num_columns + head * width)
    if part < QUERIES:
        _normed_head(
            q + (group * QUERIES + part) * q_h, q_b, q_s, x, query_weight, out, its_sums,
            first, last, seq_length, width, num_columns, EPS, NUM_SUMS, ROWS, COLUMNS,
        )  # fmt: skip
    elif part == QUERIES:
        _normed_head(
            k + group * k_h, k_b, k_s, x, key_weight, out, its_sums,
            first, last, seq_length, width, num_columns, EPS, NUM_SUMS, ROWS, COLUMNS,
        )  # fmt: skip
    elif part == QUERIES + 1:
        _copied_head(
            v + group * v_h, v_b, v_s, out, its_sums,
            first, last, seq_length, width, num_columns, NUM_SUMS, 2 * ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _copied_head(
            gate + (group * QUERIES + part - (QUERIES + 2)) * g_h, g_b, g_s, out, its_sums,
            first, last, seq_length, width, num_columns, NUM_SUMS, 2 * ROWS, COLUMNS,
        )  # fmt: skip


@triton_op("gptpar::head_norms_backward", mutates_args=())
def head_norms_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`gptpar.kernels.head_norm.backward`; at most 32 bits and ``WIDEST`` columns a head."""
    gates = v if gate is None else gate  # never read without gates
    q, k, v, gates = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v, gates))
    qkv = qkv.contiguous()
    batch, groups, seq_length, width = k.shape
    queries, num_rows, columns = q.shape[1] // groups, batch * seq_length, triton.next_power_of_2(width)
    heads = queries + 2 + (queries if gate is not None else 0)
    num_sums, rows = 3 if centred else 2, ELEMENTS // columns
    num_parts = triton.cdiv(NUM_PROGRAMS, groups * heads)
    merged = torch.empty_like(qkv)
    sums = torch.empty((num_parts, num_sums, groups, heads, width), dtype=torch.float32, device=qkv.device)
    wrap_triton(_head_norms_backward)[(groups * heads, num_parts)](
        q, k, v, gates, qkv, query_weight, key_weight, merged, sums,
        num_rows, seq_length, width, triton.cdiv(num_rows, num_parts * rows) * rows,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *gates.stride()[:3],
        QUERIES=queries, HEADS=heads, EPS=eps, NUM_SUMS=num_sums, ROWS=rows, COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    total = sums.sum(0)
    of_query, of_key = total[1:, :, :queries].sum((1, 2)), total[1:, :, queries].sum(1)
    return merged, total[0].flatten().to(qkv.dtype), of_query.to(query_weight.dtype), of_key.to(key_weight.dtype)
