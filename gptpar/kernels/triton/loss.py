"""The functions of :mod:`gptpar.kernels.plain_loss` as kernels; each reads its logits from memory once.

A row's second read, for the gradient, finds the row in the cache. The gradient overwrites the logits. Logits are
contiguous and have at most 32 bits; sums and the other arguments are fp32.

Columns of padding are read with the others: a row's whole length is a multiple of a vector's, the number of valid
columns need not be. They are masked in registers, and only in kernels that are compiled with ``PADDED``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptpar.kernels.plain_loss import CROSS_ENTROPY, LossTerms

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32: a running maximum that begins here stays finite over a row of padding alone."""

COLUMNS, NUM_WARPS = 8192, 16
"""Columns of a row that a program processes at a time, and its warps."""


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP != 0:
        x = SOFTCAP * (2 * tl.sigmoid(2 / SOFTCAP * x) - 1)  # tanh
    return x


@triton.jit
def _statistics(row, num_columns, num_valid, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr):
    maximum, total = LOWEST if PADDED else -float("inf"), 0.0
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        x = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if SOFTCAP != 0:
            x = tl.where(inside, _capped(x, SOFTCAP), -float("inf"))
        if PADDED:
            x = tl.where(columns < num_valid, x, -float("inf"))
        larger = tl.maximum(maximum, tl.max(x, 0))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), 0)
        maximum = larger
    return maximum, total


@triton.jit
def _of_label(row, label, num_columns, SOFTCAP: tl.constexpr):
    x = tl.load(row + label, mask=(label >= 0) & (label < num_columns), other=0.0).to(tl.float32)
    return _capped(x, SOFTCAP)


@triton.jit
def _write_gradient(
    row, label, log_sum, factor, num_columns, num_valid,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, Z_WEIGHT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        x = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
        x = _capped(x, SOFTCAP)
        softmax = tl.exp(x - log_sum)
        if Z_WEIGHT != 0:
            softmax = softmax * (1 + 2 * Z_WEIGHT * log_sum)
        grad = (softmax - (columns == label).to(tl.float32)) * factor
        if SOFTCAP != 0:
            grad = grad * (1 - x * x / (SOFTCAP * SOFTCAP))
        if PADDED:
            grad = tl.where(columns < num_valid, grad, 0.0)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _loss_and_grad(
    logits, labels, weights, scale, losses, num_columns, num_valid,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, Z_WEIGHT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * num_columns
    label, weight = tl.load(labels + n), tl.load(weights + n)
    of_label = _of_label(row, label, num_columns, SOFTCAP)
    maximum, total = _statistics(row, num_columns, num_valid, COLUMNS, SOFTCAP, PADDED)
    log_sum = maximum + tl.log(total)
    loss = log_sum - of_label
    if Z_WEIGHT != 0:
        loss += Z_WEIGHT * log_sum * log_sum
    tl.store(losses + n, loss * weight)
    factor = weight * tl.load(scale)
    _write_gradient(row, label, log_sum, factor, num_columns, num_valid, COLUMNS, SOFTCAP, Z_WEIGHT, PADDED)


@triton.jit
def _local_statistics(
    logits, labels, maxima, totals, of_labels, num_columns, num_valid,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * num_columns
    maximum, total = _statistics(row, num_columns, num_valid, COLUMNS, SOFTCAP, PADDED)
    tl.store(maxima + n, maximum)
    tl.store(totals + n, total)
    tl.store(of_labels + n, _of_label(row, tl.load(labels + n), num_columns, SOFTCAP))


@triton.jit
def _local_grad(
    logits, labels, log_sums, weights, scale, num_columns, num_valid,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, Z_WEIGHT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * num_columns
    factor = tl.load(weights + n) * tl.load(scale)
    label, log_sum = tl.load(labels + n), tl.load(log_sums + n)
    _write_gradient(row, label, log_sum, factor, num_columns, num_valid, COLUMNS, SOFTCAP, Z_WEIGHT, PADDED)


def _columns(logits_NV: torch.Tensor, num_valid: int | None) -> tuple[int, int, bool]:
    """(columns, valid ones, whether there are others)."""
    columns = logits_NV.shape[1]
    valid = columns if num_valid is None else num_valid
    return columns, valid, valid < columns


def loss_and_grad(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    scale: torch.Tensor,
    terms: LossTerms = CROSS_ENTROPY,
    num_valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`gptpar.kernels.plain_loss.loss_and_grad`; the gradient overwrites the logits."""
    losses_N = torch.empty_like(weights_N)
    columns, valid, padded = _columns(logits_NV, num_valid)
    _loss_and_grad[logits_NV.shape[:1]](
        logits_NV, labels_N, weights_N, scale, losses_N, columns, valid, COLUMNS, *terms, padded, num_warps=NUM_WARPS
    )  # fmt: skip
    return losses_N.sum(), logits_NV


def local_statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, softcap: float = 0.0, num_valid: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`gptpar.kernels.plain_loss.local_statistics`."""
    maximum_N, sum_N, label_N = (torch.empty_like(labels_N, dtype=torch.float32) for _ in range(3))
    columns, valid, padded = _columns(logits_NV, num_valid)
    _local_statistics[logits_NV.shape[:1]](
        logits_NV, labels_N, maximum_N, sum_N, label_N, columns, valid, COLUMNS, softcap, padded, num_warps=NUM_WARPS
    )  # fmt: skip
    return maximum_N, sum_N, label_N


def local_grad(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    lse_N: torch.Tensor,
    weights_N: torch.Tensor,
    scale: torch.Tensor,
    terms: LossTerms = CROSS_ENTROPY,
    num_valid: int | None = None,
) -> torch.Tensor:
    """See :func:`gptpar.kernels.plain_loss.local_grad`; the gradient overwrites the logits."""
    columns, valid, padded = _columns(logits_NV, num_valid)
    _local_grad[logits_NV.shape[:1]](
        logits_NV, labels_N, lse_N, weights_N, scale, columns, valid, COLUMNS, *terms, padded, num_warps=NUM_WARPS
    )  # fmt: skip
    return logits_NV
