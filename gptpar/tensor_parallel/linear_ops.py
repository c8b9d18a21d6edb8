"""Matrix products of split linear layers together with their transfers, as operators that a compiler leaves whole.

A column layer holds some output features: it gathers its input before the product, and sums the gradient of its input
after. A row layer holds some input features: it sums its output after the product, and gathers the gradient of its
output before (Shoeybi et al. 2019; with tokens split between layers, Korthikanti et al. 2022). A column layer's
backward overlaps its two transfers with its two products.

A layer that no axis splits (``group`` is empty) has no transfer; its operator adds the bias. Other layers' biases come
after the transfer.

Instead of returning a weight's gradient, a backward can add it to ``total``, the weight's gradient sum. Autograd then
gets no gradient of the weight. A hook on the scalar ``added`` tells the engine that the addition has been launched.
Where nothing is to be added, the product writes the gradient into the memory that ``PLACES`` has for it, and autograd
passes that on.

Legend: N all tokens, n this rank's (N / t under sequence parallelism over t ranks, else N), I input features and O
output features that this rank holds or needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import CustomOpDef

from gptpar.tensor_parallel.axis import gather, reduce_scatter, start_gather, start_reduce_scatter
from gptpar.tensor_parallel.products import PLAIN, add_product, product

FUSED_BYTES = 32 << 20
"""A transfer of at least this many bytes is fused; with fewer, many small products cost more than they hide."""


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def _fuses(fused: bool, x: torch.Tensor, rows: int, columns: int, format: str) -> bool:
    """Whether a transfer of ``rows`` x ``columns`` elements like those of ``x`` goes through symmetric memory."""
    return fused and format == PLAIN and x.is_cuda and rows * columns * x.element_size() >= FUSED_BYTES


def _gather_times(
    x: torch.Tensor, matrix: torch.Tensor, group: str, fused: bool, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(all ranks' rows of x, these rows @ matrix)."""
    if _fuses(fused, x, x.shape[0] * _group(group).size(), x.shape[1], format):
        # return_A even where the caller drops the rows: without it torch may choose multicast.
        rows, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [matrix], 0, group, return_A=True)
        return rows, y
    rows = gather(x, _group(group))
    return rows, product(rows, matrix, format)


PLACES: WeakValueDictionary[tuple[int, int], Callable[[], torch.Tensor | None]] = WeakValueDictionary()
"""A weight's position in memory (:func:`where`) -> a function, which returns memory of the weight's shape for its
gradient in the running backward pass, or ``None``. An operator looks it up here, because its arguments can be tensors,
numbers and texts alone."""


def where(weight: torch.Tensor) -> tuple[int, int]:
    """The weight's storage, which stays the same while its memory is freed, and its place there."""
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, format: str, total: torch.Tensor | None
) -> torch.Tensor:
    """grad_NO, x_NI -> the weight's gradient; an empty tensor if it was added to ``total``."""
    if total is None:
        place_of = PLACES.get(where(weight))
        place = None if place_of is None else place_of()
        return product(grad.t(), x, format, out=None if place is None else place.flatten(0, -2))
    add_product(total, grad.t(), x, format)
    return grad.new_empty(0)


@torch.library.custom_op("gptpar::column_forward", mutates_args=())
def column_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """x_nI, weight_OI -> y_NO; only autograd uses ``total`` and ``added``."""
    if sequence_parallel:
        return _gather_times(x, weight.t(), group, fused, format)[1]
    return product(x, weight.t(), format, bias=bias)


def _column_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_NO, x_nI, weight_OI -> gradients of x, summed over ranks, and of weight."""
    if not sequence_parallel:
        grad_x = product(grad, weight, format)
        summing = dist.all_reduce(grad_x, group=_group(group), async_op=True) if group else None
        grad_weight = weight_gradient(grad, x, weight, format, total)
        if summing is not None:
            summing.wait()
        return grad_x, grad_weight
    ranks = _group(group)
    rows, gathering = start_gather(x, ranks)
    partial = product(grad, weight, format)
    gathering.wait()
    grad_x, summing = start_reduce_scatter(partial, ranks)
    grad_weight = weight_gradient(grad, rows, weight, format, total)
    summing.wait()
    return grad_x, grad_weight


@torch.library.custom_op("gptpar::row_forward", mutates_args=())
def row_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """x_NI, weight_OI -> y_nO, summed over ranks."""
    return row_output(x, weight, bias, group, sequence_parallel, fused, format)


def row_output(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
) -> torch.Tensor:
    if sequence_parallel and _fuses(fused, x, x.shape[0], weight.shape[0], format):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
    y = product(x, weight.t(), format, bias=bias)
    if sequence_parallel:
        return reduce_scatter(y, _group(group))
    if group:
        dist.all_reduce(y, group=_group(group))
    return y


def row_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, group: str, sequence_parallel: bool, fused: bool, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_nO, weight_OI -> (grad_NO of all tokens, gradient of x)."""
    if sequence_parallel:
        return _gather_times(grad, weight, group, fused, format)
    return grad, product(grad, weight, format)


def _row_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    sequence_parallel: bool,
    fused: bool,
    format: str,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_nO, x_NI, weight_OI -> gradients of x and weight."""
    grad, grad_x = row_input_gradient(grad, weight, group, sequence_parallel, fused, format)
    return grad_x, weight_gradient(grad, x, weight, format, total)


@torch.library.custom_op("gptpar::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' tensors. The backward pass sums their gradients: each rank uses the sum differently."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group))
    return total


@column_forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, *how: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0] * (_group(group).size() if how[0] else 1), weight.shape[0])


def row_output_fake(x: torch.Tensor, weight: torch.Tensor, group: str, sequence_parallel: bool) -> torch.Tensor:
    """:func:`row_output` without values."""
    return x.new_empty(x.shape[0] // (_group(group).size() if sequence_parallel else 1), weight.shape[0])


@row_forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    return row_output_fake(x, weight, *how[:2])


@sum_over_ranks.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _summed_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return sum_over_ranks(grad, ctx.group), None


sum_over_ranks.register_autograd(_summed_gradient, setup_context=_keep_group)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, *ctx.how, ctx.total, _ = inputs
    ctx.save_for_backward(x, weight)  # not ``total``: other micro-batches change it before this backward pass


def with_backward(
    forward: CustomOpDef, name: str, gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]], options: str = ""
) -> CustomOpDef:
    """Register the backward pass of a layer's operator; returns the operator ``name`` of both gradients.

    A second operator, ``summing_NAME``, returns the gradient of x, and adds the weight's to ``total``. Neither forms
    the bias's gradient: that is a plain sum, which the compiler can join with what comes before.

    Args:
        gradients: a function of the schema's arguments; returns the gradients of x and weight.
        options: declares the operator's own arguments, which come before ``group``.
    """
    how = f"{options}str group, bool sequence_parallel, bool fused, str format"
    given = f"Tensor grad, Tensor x, Tensor weight, {how}"
    both = torch.library.custom_op(
        f"gptpar::{name}", gradients, mutates_args=(), schema=f"({given}) -> (Tensor, Tensor)"
    )
    both.register_fake(lambda grad, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
    summing = torch.library.custom_op(
        f"gptpar::summing_{name}",
        lambda *given: gradients(*given)[0],
        mutates_args=("total",),
        schema=f"({given}, Tensor(a!) total) -> Tensor",
    )
    summing.register_fake(lambda grad, x, *_: x.new_empty(x.shape))

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        how, rest = (*ctx.saved_tensors, *ctx.how), [None] * len(ctx.how)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        if ctx.total is None:
            return *both(grad, *how), grad_bias, *rest, None, None
        return summing(grad, *how, ctx.total), None, grad_bias, *rest, None, ctx.total.new_zeros(())

    forward.register_autograd(backward, setup_context=_save)
    return both


column_backward = with_backward(column_forward, "column_backward", _column_gradients)
row_backward = with_backward(row_forward, "row_backward", _row_gradients)
