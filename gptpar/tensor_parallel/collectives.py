"""Collectives over the tensor axis along the tokens (dim 0), and autograd functions made of them.

Legend: N all tokens of the micro-batch (under sequence parallelism a rank holds N / t of them), D width.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from gptpar.tensor_parallel.axis import TensorAxis
from gptpar.topology.groups import all_gather_single, reduce_scatter_single


def start_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather every rank's rows; the result holds them once ``wait()`` has returned."""
    full = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return full, all_gather_single(full, x.contiguous(), group=group, async_op=True)


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Begin to sum over the ranks; the result holds this rank's rows of the sum once ``wait()`` has returned.

    Args:
        x: rows of all ranks; their number must be a multiple of the group's size. It must live until ``wait()``.
    """
    assert x.shape[0] % group.size() == 0, f"{x.shape[0]} tokens do not divide over {group.size()} tensor ranks"
    own = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return own, reduce_scatter_single(own, x.contiguous(), group=group, async_op=True)


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks."""
    full, work = start_gather(x, group)
    work.wait()
    return full


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows of the sum over ranks."""
    own, work = start_reduce_scatter(x, group)
    work.wait()
    return own


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row r of each rank goes to rank r; the result has the rows from all ranks, in the order of ranks."""
    x = x.contiguous()
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, group=group)
    return exchanged


class Collective(torch.autograd.Function):
    """One collective forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, there: Any, back: Any) -> torch.Tensor:
        """``there`` and ``back`` take (tensor, group); ``None`` leaves the tensor as it is."""
        ctx.group, ctx.back = group, back
        return x.view_as(x) if there is None else there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """The gradient of ``x``."""
        return (grad if ctx.back is None else ctx.back(grad, ctx.group)), None, None, None


def gather_tokens(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """The tokens of all ranks; backward sums the ranks' gradients and keeps this rank's tokens."""
    return x if axis.size == 1 else Collective.apply(x, axis.group, gather, reduce_scatter)


def scatter_sum_tokens(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """This rank's tokens of the sum over ranks; backward gathers the gradients of all tokens."""
    return x if axis.size == 1 else Collective.apply(x, axis.group, reduce_scatter, gather)


def sum_over(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """The sum over ranks; backward passes the gradient on, since every rank has the same."""
    return x if axis.size == 1 else Collective.apply(x, axis.group, all_reduce, None)


def copy_to(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """The tensor itself, which is equal on all ranks; they use it differently, so backward sums the gradients."""
    return x if axis.size == 1 else Collective.apply(x, axis.group, None, all_reduce)


def symmetric_memory_works(group: dist.ProcessGroup) -> bool:
    """Whether the group's GPUs can read each other's memory, tried on a small buffer. All ranks call it together.

    It needs CUDA, one host, one GPU for each rank that all processes see, and peer access between all GPUs.
    """
    if not torch.cuda.is_available():
        return False
    here = torch.cuda.current_device()
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), here), group=group)
    devices = {device for _, device in places}
    reachable = (
        len({host for host, _ in places}) == 1
        and len(devices) == group.size()
        and max(devices) < torch.cuda.device_count()
        and all(torch.cuda.can_device_access_peer(here, device) for device in devices - {here})
    )
    if not _all_say_yes(reachable, group):
        return False
    try:
        buffer = symmetric_memory.empty(1024, dtype=torch.uint8, device=torch.device("cuda", here))
        symmetric_memory.rendezvous(buffer, group)
        works = True
    except RuntimeError:
        works = False
    return _all_say_yes(works, group)


def _all_say_yes(yes: bool, group: dist.ProcessGroup) -> bool:
    vote = torch.tensor(int(yes), device="cuda")
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())
