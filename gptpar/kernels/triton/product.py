"""Products with a symmetric result on a GPU: tiles of one triangle are computed, the others are their mirror images."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE, INNER = 128, 64
"""Rows and columns of a tile of the result; columns of the factors that are multiplied at a time."""


@triton.jit
def _symmetric(
    x, added, out, rows, columns, x_matrix, x_row, alpha, beta, diagonal,
    ADDS: tl.constexpr, IS_EVEN: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # The tiles of the lower triangle by rows: row i begins with tile i (i + 1) / 2. A rounded square root is mended.
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    down, across, along = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, INNER)
    left = x + matrix * x_matrix + (down % rows)[:, None] * x_row + along[None, :]
    right = x + matrix * x_matrix + (across % rows)[None, :] * x_row + along[:, None]
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for first in range(0, columns, INNER):
        if IS_EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=(along < columns - first)[None, :], other=0.0)
            b = tl.load(right, mask=(along < columns - first)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += INNER
        right += INNER
    inside = (down < rows)[:, None] & (across < rows)[None, :]
    at = down[:, None] * rows + across[None, :]
    result = out + matrix * rows * rows
    if ADDS:
        total *= alpha
        total += beta * tl.load(added + matrix * rows * rows + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(down[:, None] == across[None, :], total + diagonal, total)
    values = total.to(out.dtype.element_ty)
    tl.store(result + at, values, mask=inside)
    if i != j:
        tl.store(result + across[:, None] * rows + down[None, :], tl.trans(values), mask=tl.trans(inside))


def gram(x: torch.Tensor) -> torch.Tensor:
    """``x @ x.mT``, summed in fp32 and rounded once.

    Args:
        x: [matrices, rows, columns] in 16 bits, contiguous in the columns.
    """
    return _launched(x, None, 1.0, 0.0, 0.0)


def polynomial(x: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """``a * I + b * x + c * x @ x`` of symmetric x, summed in fp32 and rounded once.

    Args:
        x: [matrices, rows, rows] in 16 bits, contiguous.
    """
    return _launched(x, x, c, b, a)


def _launched(x: torch.Tensor, added: torch.Tensor | None, alpha: float, beta: float, diagonal: float) -> torch.Tensor:
    matrices, rows, columns = x.shape
    out, tiles = x.new_empty(matrices, rows, rows), triton.cdiv(rows, TILE)
    _symmetric[(tiles * (tiles + 1) // 2, matrices)](
        x, added, out, rows, columns, x.stride(0), x.stride(1), alpha, beta, diagonal,
        ADDS=added is not None, IS_EVEN=columns % INNER == 0, TILE=TILE, INNER=INNER, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
