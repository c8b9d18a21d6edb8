"""Brings tokens to their experts and back, and multiplies each expert's tokens with its own weight.

The rows of an expert are its tokens in their order in the micro-batch. They are found by a stable sort, and every sum
over a token's experts is a gather in a fixed order, so that no result depends on which thread is first.

Legend: N tokens, K experts of a token, M = N * K rows, E experts, D width, I input and O output features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gptpar.kernels import gpu
from gptpar.model.experts.routing import counts_of

ROW_BYTES = 16
"""The grouped kernel needs matrices whose rows have a multiple of this many bytes."""
PLACE_BYTES = 32
"""Bytes that are kept for a copy of a token: its expert, and its row, choice and token in :class:`Places`."""
KERNEL_BYTES = 128
"""A kernel moves rows of at least this many bytes."""
GROUPED_CAPABILITIES = (9,)
"""Major compute capabilities of GPUs whose grouped kernel is known to be right. On Blackwell, experts without tokens
got gradients (pytorch#172439). Other GPUs run a loop, which waits for the device."""


class Places(NamedTuple):
    """Where each token's copies are among the rows that are sorted by expert.

    Attributes:
        tokens_M: the token of each row.
        rows_NK: the row of each token's K copies.
        choices_M: for each row its index in ``rows_NK.flatten()``: the inverse permutation.
        counts_E: int64, rows of each expert. Further rows are of no expert, and may hold any numbers.
        taken_NK: bool, whether a copy has an expert; ``None``: all have one.
    """

    tokens_M: torch.Tensor
    rows_NK: torch.Tensor
    choices_M: torch.Tensor
    counts_E: torch.Tensor
    taken_NK: torch.Tensor | None

    def first(self, num_rows: int) -> Places:
        """The same with the first rows alone; those left out are of no expert."""
        rows_NK = self.rows_NK.clamp(max=num_rows - 1)
        return self._replace(tokens_M=self.tokens_M[:num_rows], rows_NK=rows_NK, choices_M=self.choices_M[:num_rows])


@torch.no_grad()
def places_of(
    chosen_NK: torch.Tensor, num_experts: int, counts_E: torch.Tensor | None = None, *, has_none: bool = False
) -> Places:
    """The order of rows: by expert, then by token; rows of no expert are the last, and not counted.

    Args:
        counts_E: how often each expert was chosen, if that is known.
        has_none: whether some copies have no expert, that is, the number E.
    """
    flat_M = chosen_NK.flatten()
    choices_M = flat_M.argsort(stable=True)
    rows_M = torch.empty_like(choices_M)
    rows_M[choices_M] = torch.arange(len(flat_M), device=flat_M.device)
    if counts_E is None:
        counts_E = counts_of(chosen_NK[None], num_experts + 1)[0, :num_experts]
    taken_NK = chosen_NK < num_experts if has_none else None
    return Places(choices_M // chosen_NK.shape[1], rows_M.view_as(chosen_NK), choices_M, counts_E, taken_NK)


class _Scattered(torch.autograd.Function):
    """Each token's copies, sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, tokens_M: torch.Tensor, rows_NK: torch.Tensor, taken_NK: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_NK, taken_NK)
        if _moves_rows(x_ND):
            return gpu.copies.scattered_copies(x_ND, rows_NK, taken_NK, len(tokens_M))
        return x_ND.index_select(0, tokens_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> Any:  # type: ignore[override]
        return _sum_of_copies(grad_MD, *ctx.saved_tensors), None, None, None


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
        taken_NK: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(y_MD, weights_NK, tokens_M, rows_NK, choices_M, taken_NK)
        return _sum_of_copies(y_MD, rows_NK, taken_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> Any:  # type: ignore[override]
        y_MD, weights_NK, tokens_M, rows_NK, choices_M, taken_NK = ctx.saved_tensors
        if _moves_rows(y_MD):
            of_both = gpu.copies.weighted_copies_backward(grad_ND, y_MD, weights_NK, rows_NK, taken_NK)
            return *of_both, None, None, None, None
        grad_MD, weights_M = grad_ND.index_select(0, tokens_M), weights_NK.flatten()[choices_M]
        of_weights_NK = (grad_MD.to(weights_M.dtype) * y_MD).sum(-1)[rows_NK]
        if taken_NK is not None:
            of_weights_NK = of_weights_NK.where(taken_NK, 0)
        torch.mul(grad_MD, weights_M[:, None], out=grad_MD)
        return grad_MD, of_weights_NK, None, None, None, None


class _Added(torch.autograd.Function):
    """The sum of each token's own row and its copies, in fp32 or wider: the transpose of :class:`_Scattered`."""

    @staticmethod
    def forward(
        ctx: Any,
        own_ND: torch.Tensor,
        y_MD: torch.Tensor,
        tokens_M: torch.Tensor,
        rows_NK: torch.Tensor,
        taken_NK: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_M)
        return _sum_of_copies(y_MD, rows_NK, taken_NK, own_ND=own_ND)

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> Any:  # type: ignore[override]
        (tokens_M,) = ctx.saved_tensors
        return grad_ND, grad_ND.index_select(0, tokens_M), None, None, None


def _moves_rows(x: torch.Tensor) -> bool:
    """Whether kernels move rows like these: short ones, such as weights, are left to torch."""
    return len(x) > 0 and gpu.takes(x) and x.shape[1] * x.element_size() >= KERNEL_BYTES


def _sum_of_copies(
    y_MD: torch.Tensor,
    rows_NK: torch.Tensor,
    taken_NK: torch.Tensor | None,
    weights_NK: torch.Tensor | None = None,
    own_ND: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(y_MD.dtype, torch.float32)
    total_ND = torch.zeros(len(rows_NK), y_MD.shape[1], dtype=wide, device=y_MD.device)
    if own_ND is not None:
        total_ND += own_ND
    for k in range(rows_NK.shape[1]):
        copies_ND = y_MD.index_select(0, rows_NK[:, k])
        if taken_NK is not None:
            copies_ND = copies_ND.where(taken_NK[:, k, None], 0)
        if weights_NK is None:
            total_ND += copies_ND
        else:
            total_ND.addcmul_(copies_ND.to(wide), weights_NK[:, k, None])
    return total_ND.to(y_MD.dtype).view_as(total_ND)  # the view: see Collective


def scattered(x_ND: torch.Tensor, places: Places) -> torch.Tensor:
    """[M, D] each token's copies, sorted by expert."""
    return _Scattered.apply(x_ND, places.tokens_M, places.rows_NK, places.taken_NK)


def combined(y_MD: torch.Tensor, weights_NK: torch.Tensor, places: Places) -> torch.Tensor:
    """[N, D] the weighted sum of each token's copies."""
    return _Combined.apply(y_MD, weights_NK, places.tokens_M, places.rows_NK, places.choices_M, places.taken_NK)


def added(y_MD: torch.Tensor, places: Places, own_ND: torch.Tensor) -> torch.Tensor:
    """[N, D] the sum of each token's own row and its copies."""
    return _Added.apply(own_ND, y_MD, places.tokens_M, places.rows_NK, places.taken_NK)


def grouped_product(x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """[M, O] each expert's rows times the transpose of its weight.

    Args:
        x_MI: rows, sorted by expert. The last ones may be of no expert, and are then not computed.
        counts_E: int64, rows of each expert.
    """
    if _has_kernel(x_MI, *weight_EOI.shape[1:]):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    *parts, rest = _parts_of(x_MI, counts_E)
    found = [part @ weight_OI.t() for part, weight_OI in zip(parts, weight_EOI.unbind(), strict=True)]
    return torch.cat([*found, rest.new_zeros(len(rest), weight_EOI.shape[1])])


def _parts_of(x_MI: torch.Tensor, counts_E: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each expert's rows, and those of none; the host waits for the counts."""
    counts = counts_E.tolist()
    return x_MI.split([*counts, len(x_MI) - sum(counts)])


class _Biased(torch.autograd.Function):
    """Rows with their expert's bias, whose gradient is the sum over the expert's rows."""

    @staticmethod
    def forward(ctx: Any, y_MO: torch.Tensor, bias_EO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts_E)
        rows_M = torch.arange(len(y_MO), device=y_MO.device)
        experts_M = torch.searchsorted(counts_E.cumsum(0), rows_M, right=True).clamp(max=len(bias_EO) - 1)
        return y_MO + bias_EO.index_select(0, experts_M)

    @staticmethod
    def backward(ctx: Any, grad_MO: torch.Tensor) -> Any:  # type: ignore[override]
        (counts_E,) = ctx.saved_tensors
        return grad_MO, _sums_of_rows(grad_MO, counts_E), None


def _sums_of_rows(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """[E, O] the sum of each expert's rows."""
    if _has_kernel(x_MO, x_MO.shape[1]):
        return sums_of_experts_rows(x_MO, counts_E)
    return torch.stack([part.sum(0) for part in _parts_of(x_MO, counts_E)[:-1]])


@torch.library.custom_op("gptpar::sums_of_experts_rows", mutates_args=())
def sums_of_experts_rows(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The same by the grouped kernel, as a product with ones, in fp32.

    It is an operator of its own, so that the ones stay as they are stored here: an expert may then have any number of
    rows. torch.compile would store them transposed, where each expert's part has to begin at a multiple of 16 bytes.
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
