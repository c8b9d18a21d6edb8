"""Copies of tokens for their experts, and the gradients of the weighted sums of these copies.

Each program processes one copy. The copies of a token are processed beside each other, so that its row is read from
memory once. In the order of experts, it would be read once for each of its experts.

The kernels are registered as operators, as those of :mod:`gptpar.kernels.triton.bias`.

Legend: N tokens, K copies of a token, M rows that are sorted by expert, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

COLUMNS, NUM_WARPS = 2048, 4
"""At most this many columns of a row are processed at a time, and the warps of a program."""


@triton.jit
def _scatter(x, rows, taken, scattered, copies, width, HAS_NONE: tl.constexpr, COLUMNS: tl.constexpr):
    copy = tl.program_id(0).to(tl.int64)
    taken_width = width
    if HAS_NONE:
        taken_width = width * tl.load(taken + copy).to(tl.int32)
    source = x + copy // copies * width
    target = scattered + tl.load(rows + copy) * width
    for start in range(0, taken_width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < taken_width
        tl.store(target + columns, tl.load(source + columns, mask=inside), mask=inside)


@triton_op("gptpar::scattered_copies", mutates_args=())
def scattered_copies(
    x_ND: torch.Tensor, rows_NK: torch.Tensor, taken_NK: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """[M, D] each token's copies in their rows; dtypes of at most 32 bits.

    Args:
        taken_NK: whether a copy has a row; ``None``: all have. Rows that nobody takes hold any numbers.
        num_rows: M.
    """
    x_ND, rows_NK = x_ND.contiguous(), rows_NK.contiguous()
    taken = rows_NK if taken_NK is None else taken_NK.contiguous()  # HAS_NONE says whether it is read
    scattered_MD = x_ND.new_empty(num_rows, x_ND.shape[1])
    wrap_triton(_scatter)[(rows_NK.numel(),)](
        x_ND, rows_NK, taken, scattered_MD, rows_NK.shape[1], x_ND.shape[1],
        HAS_NONE=taken_NK is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return scattered_MD


@triton.jit
def _weighted_backward(
    grad, y, weights, rows, taken, grad_y, grad_weights, copies, width,
    HAS_NONE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0).to(tl.int64)
    taken_width = width
    if HAS_NONE:
        taken_width = width * tl.load(taken + copy).to(tl.int32)
    weight, row_at = tl.load(weights + copy), tl.load(rows + copy) * width
    source = grad + copy // copies * width
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, taken_width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < taken_width
        g = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        total += g * tl.load(y + row_at + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_y + row_at + columns, (g * weight).to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + copy, tl.sum(total, 0))


@triton_op("gptpar::weighted_copies_backward", mutates_args=())
def weighted_copies_backward(
    grad_ND: torch.Tensor,
    y_MD: torch.Tensor,
    weights_NK: torch.Tensor,
    rows_NK: torch.Tensor,
    taken_NK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of y_MD, gradient of weights_NK) of the weighted sums of each token's copies.

    Args:
        weights_NK: fp32.
        taken_NK: see :func:`scattered_copies`.
    """
    grad_ND, y_MD, weights_NK, rows_NK = (t.contiguous() for t in (grad_ND, y_MD, weights_NK, rows_NK))
    taken = rows_NK if taken_NK is None else taken_NK.contiguous()
    grad_y_MD, grad_weights_NK = torch.empty_like(y_MD), torch.empty_like(weights_NK)
    wrap_triton(_weighted_backward)[(rows_NK.numel(),)](
        grad_ND, y_MD, weights_NK, rows_NK, taken, grad_y_MD, grad_weights_NK, rows_NK.shape[1], y_MD.shape[1],
        HAS_NONE=taken_NK is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return grad_y_MD, grad_weights_NK
