"""Brings tokens to their experts and back, and multiplies each expert's tokens with its own weight.

The rows of an expert are its tokens in their order in the micro-batch. They are found by a stable sort, and every sum
over a token's experts is a gather in a fixed order, so that no result depends on which thread is first.

Legend: N tokens, K experts of a token, M = N * K rows, E experts, D width, I input and O output features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gptpar.model.experts.routing import counts_of

ROW_BYTES = 16
"""Of a matrix's row, the grouped kernel needs a multiple of this."""
PLACE_BYTES = 32
"""Of a copy of a token: its places and its expert."""
GROUPED_CAPABILITIES = (9,)
"""Of GPUs whose grouped kernel is known to be right; on Blackwell, experts without tokens got gradients
(pytorch#172439). Others run a loop, which waits for the device."""


class Places(NamedTuple):
    """Where each token's copies are among the rows that are sorted by expert.

    Attributes:
        tokens_M: the token of each row.
        rows_NK: the row of each token's K copies.
        choices_M: the row of ``rows_NK.flatten()`` that each row is; the inverse of it.
        counts_E: int64, rows of each expert.
    """

    tokens_M: torch.Tensor
    rows_NK: torch.Tensor
    choices_M: torch.Tensor
    counts_E: torch.Tensor


@torch.no_grad()
def places_of(chosen_NK: torch.Tensor, num_experts: int) -> Places:
    """The order of rows: by expert, then by token; rows of no expert (number E) are the last, and not counted."""
    flat_M = chosen_NK.flatten()
    choices_M = flat_M.argsort(stable=True)
    rows_M = torch.empty_like(choices_M)
    rows_M[choices_M] = torch.arange(len(flat_M), device=flat_M.device)
    tokens_M, counts_E = choices_M // chosen_NK.shape[1], counts_of(chosen_NK[None], num_experts + 1)[0, :num_experts]
    return Places(tokens_M, rows_M.view_as(chosen_NK), choices_M, counts_E)


class _Scattered(torch.autograd.Function):
    """Each token's copies, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, tokens_M: torch.Tensor, rows_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_NK)
        return x_ND.index_select(0, tokens_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> Any:  # type: ignore[override]
        (rows_NK,) = ctx.saved_tensors
        return _sum_of_copies(grad_MD, rows_NK, None), None, None


class _Combined(torch.autograd.Function):
    """The weighted sum of each token's copies, in fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        y_MD: torch.Tensor,
        weights_NK: torch.Tensor,
        tokens_M: torch.Tensor,
        rows_NK: torch.Tensor,
        choices_M: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(y_MD, weights_NK, tokens_M, rows_NK, choices_M)
        return _sum_of_copies(y_MD, rows_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> Any:  # type: ignore[override]
        y_MD, weights_NK, tokens_M, rows_NK, choices_M = ctx.saved_tensors
        grad_MD, weights_M = grad_ND.index_select(0, tokens_M), weights_NK.flatten()[choices_M]
        of_weights_M = (grad_MD.to(weights_M.dtype) * y_MD).sum(-1)
        torch.mul(grad_MD, weights_M[:, None], out=grad_MD)
        return grad_MD, of_weights_M[rows_NK], None, None, None


def _sum_of_copies(y_MD: torch.Tensor, rows_NK: torch.Tensor, weights_NK: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(y_MD.dtype, torch.float32)
    total_ND = torch.zeros(len(rows_NK), y_MD.shape[1], dtype=wide, device=y_MD.device)
    for k in range(rows_NK.shape[1]):
        copies_ND = y_MD.index_select(0, rows_NK[:, k])
        if weights_NK is None:
            total_ND += copies_ND
        else:
            total_ND.addcmul_(copies_ND.to(wide), weights_NK[:, k, None])
    return total_ND.to(y_MD.dtype)


def scattered(x_ND: torch.Tensor, places: Places) -> torch.Tensor:
    """[M, D] each token's copies, sorted by expert."""
    return _Scattered.apply(x_ND, places.tokens_M, places.rows_NK)


def combined(y_MD: torch.Tensor, weights_NK: torch.Tensor, places: Places) -> torch.Tensor:
    """[N, D] the weighted sum of each token's copies."""
    return _Combined.apply(y_MD, weights_NK, places.tokens_M, places.rows_NK, places.choices_M)


def grouped_product(x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """[M, O] each expert's rows times the transpose of its weight.

    Args:
        x_MI: rows, sorted by expert.
        counts_E: int64, rows of each expert.
    """
    if _has_kernel(x_MI, *weight_EOI.shape[1:]):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    parts = zip(x_MI.split(counts_E.tolist()), weight_EOI.unbind(), strict=True)
    return torch.cat([part @ weight_OI.t() for part, weight_OI in parts])


class _Biased(torch.autograd.Function):
    """Rows with their expert's bias, whose gradient is the sum over the expert's rows."""

    @staticmethod
    def forward(ctx: Any, y_MO: torch.Tensor, bias_EO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts_E)
        rows_M = torch.arange(len(y_MO), device=y_MO.device)
        return y_MO + bias_EO.index_select(0, torch.searchsorted(counts_E.cumsum(0), rows_M, right=True))

    @staticmethod
    def backward(ctx: Any, grad_MO: torch.Tensor) -> Any:  # type: ignore[override]
        (counts_E,) = ctx.saved_tensors
        return grad_MO, _sums_of_rows(grad_MO, counts_E), None


def _sums_of_rows(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """[E, O] the sum of each expert's rows."""
    if _has_kernel(x_MO, x_MO.shape[1]):
        return sums_of_experts_rows(x_MO, counts_E)
    return torch.stack([part.sum(0) for part in x_MO.split(counts_E.tolist())])


@torch.library.custom_op("gptpar::sums_of_experts_rows", mutates_args=())
def sums_of_experts_rows(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The same by the grouped kernel, as a product with ones, in fp32.

    It is an operator of its own: of columns of ones, the kernel takes any number for an expert. torch.compile would
    store them as rows, where each expert's part has to begin at a multiple of 16 bytes.
    """
    ones_MR = x_MO.new_ones(len(x_MO), ROW_BYTES // x_MO.element_size())
    sums_ERO = F.grouped_mm(ones_MR.t(), x_MO.contiguous(), offs=counts_E.cumsum(0).to(torch.int32))
    return sums_ERO[:, 0].contiguous()


@sums_of_experts_rows.register_fake
def _(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    return x_MO.new_empty(len(counts_E), x_MO.shape[1])


def with_biases(y_MO: torch.Tensor, bias_EO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """[M, O] rows, sorted by expert, each with its expert's bias."""
    return _Biased.apply(y_MO, bias_EO, counts_E)


def _has_kernel(x_MI: torch.Tensor, *sizes: int) -> bool:
    """Whether one kernel multiplies all experts, without waiting for their counts.

    Args:
        *sizes: of the rows that it reads and writes.
    """
    if not len(x_MI) or not x_MI.is_cuda or x_MI.dtype != torch.bfloat16:
        return False
    is_aligned = all(size * x_MI.element_size() % ROW_BYTES == 0 for size in sizes)
    return is_aligned and has_grouped_kernel(x_MI.device)


def has_grouped_kernel(device: torch.device) -> bool:
    """Whether a GPU has a kernel that multiplies all experts in bf16."""
    return torch.cuda.get_device_capability(device)[0] in GROUPED_CAPABILITIES
