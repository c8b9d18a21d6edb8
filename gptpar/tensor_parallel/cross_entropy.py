"""The LM head fused with its loss, so that the logits of a micro-batch never exist all at once.

Logits of N tokens and a vocabulary of V take 4NV bytes in fp32: 3.3 GB for 16 x 1,024 tokens and V = 50,304. Here the
logits, the loss and, in training, the gradients are formed for a chunk of tokens at a time. If the vocabulary is split,
each rank forms the logits of its own range, and the ranks exchange three numbers for each token: the maximum, the sum
of exponentials and the label's logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gptpar.kernels import gpu, plain_loss
from gptpar.kernels.addition import add
from gptpar.kernels.plain_loss import CROSS_ENTROPY, LossTerms, token_losses
from gptpar.tensor_parallel.axis import ALONE, TensorAxis
from gptpar.tensor_parallel.products import product
from gptpar.topology.placement import Split

CHUNK_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}
"""At most this many bytes of logits exist at once, by type of device."""

ROW_PIECES, MIN_ROWS, ROW_TILE = 4, 1 << 13, 128
"""A chunk's part of the weight's gradient is formed in ``ROW_PIECES`` pieces of at least about ``MIN_ROWS`` rows,
multiples of ``ROW_TILE``. So the CPU optimizer can begin with the first piece while the next one is computed; smaller
pieces would not keep a GPU busy. Runs without offload form the same pieces: offload changes no bit."""


def num_chunks(num_tokens: int, vocab_size: int, element_size: int, device_type: str) -> int:
    """Number of chunks of tokens, so that one chunk's logits take at most ``CHUNK_BYTES``.

    Args:
        vocab_size: logits of each token on this rank.
        element_size: bytes of a logit.
    """
    tokens_a_chunk = max(1, CHUNK_BYTES[device_type] // (vocab_size * element_size))
    return -(-num_tokens // tokens_a_chunk)


def row_pieces(num_rows: int) -> list[slice]:
    """The ranges of rows in which the weight's gradient is formed, in ascending order."""
    count = min(ROW_PIECES, max(1, num_rows // MIN_ROWS))
    size = -(-num_rows // (count * ROW_TILE)) * ROW_TILE
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _weight_grad(
    grad_NV: torch.Tensor,
    hidden_ND: torch.Tensor,
    others_VD: torch.Tensor | None,
    dtype: torch.dtype,
    on_rows: Callable[[torch.Tensor, slice], None] | None,
) -> torch.Tensor:
    """The weight's gradient of a chunk and of those before it.

    A chunk's part has the operands' number format; the sum is rounded once.

    Args:
        others_VD: the gradient of those before; where it is wide and stays so, it is overwritten.
        dtype: of the result.
        on_rows: is called with the gradient and some of its rows, as soon as these are formed.
    """
    is_wide = dtype != hidden_ND.dtype
    if is_wide and others_VD is not None and others_VD.dtype == dtype:
        grad_VD = others_VD
    else:
        grad_VD = hidden_ND.new_empty(grad_NV.shape[1], hidden_ND.shape[1], dtype=dtype)
    for rows in row_pieces(len(grad_VD)):
        part = product(grad_NV[:, rows].t(), hidden_ND, out=None if is_wide else grad_VD[rows])
        if others_VD is not None:
            add(others_VD[rows], part, grad_VD[rows])
        del part  # before the next one
        if on_rows is not None:
            on_rows(grad_VD, rows)
    return grad_VD


def _chunk_loss(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    scale: torch.Tensor | None,
    axis: TensorAxis,
    terms: LossTerms,
    num_valid: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(a chunk's loss over the whole vocabulary, the gradient in this rank's logits or ``None`` without a scale).

    The gradient may overwrite the logits.
    """
    kernels = gpu.loss if gpu.takes(logits_NV) else plain_loss
    if axis.size == 1 and scale is not None:
        return kernels.loss_and_grad(logits_NV, labels_N, weights_N, scale, terms, num_valid)
    lse_N, label_N = _statistics(logits_NV, labels_N, axis, terms, num_valid)
    loss = (token_losses(lse_N, label_N, terms) * weights_N).sum()
    if scale is None:
        return loss, None
    return loss, kernels.local_grad(logits_NV, labels_N, lse_N, weights_N, scale, terms, num_valid)


def _statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, axis: TensorAxis, terms: LossTerms, num_valid: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp_N, the label's logit_N) over the whole vocabulary."""
    kernels = gpu.loss if gpu.takes(logits_NV) else plain_loss
    maximum_N, sum_N, label_N = kernels.local_statistics(logits_NV, labels_N, terms.softcap, num_valid)
    if axis.size > 1:
        own_maximum_N, maximum_N = maximum_N, maximum_N.clone()
        dist.all_reduce(maximum_N, op=dist.ReduceOp.MAX, group=axis.group)
        sums_2N = torch.stack([sum_N * (own_maximum_N - maximum_N).exp(), label_N])
        dist.all_reduce(sums_2N, group=axis.group)
        sum_N, label_N = sums_2N.unbind()
    return sum_N.log() + maximum_N, label_N


def _num_valid(first: int, rows: int, num_ids: int | None) -> int | None:
    """Number of this rank's rows that belong to one of the first ``num_ids`` tokens; ``None``: all of them do."""
    return None if num_ids is None or first + rows <= num_ids else max(0, num_ids - first)


def _chunk_tokens(hidden_ND: torch.Tensor, longest_split: int) -> int:
    """Number of tokens in a chunk. It follows from the vocabulary's longest split: all ranks must form equal chunks."""
    num_tokens, element_size = hidden_ND.shape[0], hidden_ND.element_size()
    return -(-num_tokens // num_chunks(num_tokens, longest_split, element_size, hidden_ND.device.type))


@torch.no_grad()
def losses_of_tokens(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    axis: TensorAxis,
    split: Split | None = None,
    terms: LossTerms = CROSS_ENTROPY,
    num_ids: int | None = None,
) -> torch.Tensor:
    """losses_N: the loss of each token, unweighted; without gradients.

    Args:
        axis, split, terms, num_ids: see :meth:`LinearCrossEntropy.forward`.
    """
    first, longest = (0, weight_VD.shape[0]) if split is None else (split.start, split.longest)
    num_valid = _num_valid(first, weight_VD.shape[0], num_ids)
    size = _chunk_tokens(hidden_ND, longest)
    chunks = zip(hidden_ND.split(size), (labels_N - first).split(size), strict=True)
    return torch.cat(
        [
            token_losses(*_statistics(product(hidden, weight_VD.t()), labels, axis, terms, num_valid), terms)
            for hidden, labels in chunks
        ]
    )


class LinearCrossEntropy(torch.autograd.Function):
    """``sum_n weights[n] * cross_entropy(hidden[n] @ weight.T, labels[n])``, and what ``LossTerms`` add to that.

    The gradients are formed in the forward pass, already multiplied by ``scale`` (the loss scale over the number of
    micro-batches): in fp16 they would vanish if they were scaled later. ``backward`` expects that the incoming gradient
    is this scale; if it is another number, ``backward`` corrects the gradients.

    On a tensor axis ``weight`` holds this rank's range of the vocabulary and ``hidden`` holds all tokens. Every rank
    gets the whole loss. Its gradient of ``hidden`` covers this rank's range alone and has to be summed over the axis.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor,
        scale: torch.Tensor,
        axis: TensorAxis = ALONE,
        split: Split | None = None,
        on_weight_grad: Callable[[torch.Tensor, slice], None] | None = None,
        terms: LossTerms = CROSS_ENTROPY,
        num_ids: int | None = None,
    ) -> torch.Tensor:
        """Returns the scalar loss (fp32 or wider).

        Args:
            labels_N: global numbers of tokens.
            weights_N: factor of each token's loss, such as 1 / N.
            scale: scalar, the incoming gradient that ``backward`` will be given.
            axis: the ranks that split the vocabulary.
            split: of the weight's rows, with this rank's range; ``None``: this rank has all rows.
            on_weight_grad: is called with the weight's gradient and some of its rows, as soon as these are formed; in
                ascending order, until all are.
            terms: what the loss adds to the cross entropy (:mod:`gptpar.kernels.plain_loss`).
            num_ids: number of tokens of the whole vocabulary. The softmax is over their rows; further rows are padding.
                ``None``: all rows.
        """
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        needs_grad = any(ctx.needs_input_grad)
        num_tokens = hidden_ND.shape[0]
        first, longest = (0, weight_VD.shape[0]) if split is None else (split.start, split.longest)
        num_valid = _num_valid(first, weight_VD.shape[0], num_ids)
        step = _chunk_tokens(hidden_ND, longest)
        own_labels_N = labels_N - first if first else labels_N
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        grad_weight_VD: torch.Tensor | None = None
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            logits_NV = product(hidden_ND[part], weight_VD.t())
            to_scale = scale if needs_grad else None
            chunk_loss, grad_NV = _chunk_loss(
                logits_NV, own_labels_N[part], weights_N[part], to_scale, axis, terms, num_valid
            )
            del logits_NV
            loss = loss + chunk_loss  # not in place: see Collective
            if grad_hidden_ND is None or grad_NV is None:
                continue
            is_last = start + step >= num_tokens
            # One chunk's part is kept in the weight's number format, sums of several in fp32.
            dtype = hidden_ND.dtype if grad_weight_VD is None or is_last else wide
            on_rows = on_weight_grad if is_last else None
            grad_weight_VD = _weight_grad(grad_NV, hidden_ND[part], grad_weight_VD, dtype, on_rows)
            product(grad_NV, weight_VD, out=grad_hidden_ND[part])
            del grad_NV  # before the next logits
        if needs_grad:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Gradients of hidden and weight; if the incoming one is ``scale`` itself, those that the graph keeps."""
        *gradients, scale = ctx.saved_tensors
        # The engine passes ``scale`` itself, as its address shows. Compiled code has no addresses.
        if torch.compiler.is_compiling() or grad_loss.data_ptr() != scale.data_ptr():
            ratio = grad_loss / scale
            gradients = [gradient * ratio.to(gradient.dtype) for gradient in gradients]
        return *gradients, *[None] * 8
