"""This process's place on the tensor axis, and collectives over the axis with their autograd functions.

The place decides which part of a weight or of the vocabulary a rank holds, and which gradients the ranks sum.
Collectives divide and join along the tokens (dim 0).

Legend: N all tokens of the micro-batch (under sequence parallelism a rank holds N / t of them), D width.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from gptpar.topology.groups import all_gather_single, reduce_scatter_single
from gptpar.topology.mesh import TENSOR
from gptpar.topology.placement import REPLICATED, Placement, Split, range_of

ADDENDS = Placement(gradient_sum=frozenset({TENSOR}))


@dataclass(frozen=True)
class TensorAxis:
    """This process's place on the tensor axis; by default it is alone there.

    Attributes:
        size: number of ranks that split each layer.
        rank: this process's position among them.
        group: the process group of these ranks; ``None`` when alone.
        sequence_parallel: whether each rank holds only its own tokens between layers (Korthikanti et al. 2022).
        fused: whether transfers may be fused with matrix products through symmetric memory.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    fused: bool = False

    @property
    def group_name(self) -> str:
        """The group's name, by which compiled code refers to it; empty when alone."""
        return "" if self.group is None else self.group.group_name

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank holds only some of the tokens between layers."""
        return self.sequence_parallel and self.size > 1

    @property
    def token_splits(self) -> int:
        """Number of ranks that divide the tokens between layers."""
        return self.size if self.splits_tokens else 1

    def range_of(self, length: int) -> tuple[int, int]:
        """This rank's range [start, stop) of ``length`` rows; the ranks' lengths differ by at most one."""
        return range_of(self.rank, self.size, length)

    def split_of(self, dim: int, full: int) -> Split:
        """How a dimension of length ``full`` is split: this rank's start, and the longest range of any rank."""
        return Split(dim, full, self.range_of(full)[0], -(-full // self.size))

    def split(self, dim: int, full: int) -> Placement:
        """The placement of a parameter whose dimension of length ``full`` the ranks divide into ranges."""
        return Placement({TENSOR: self.split_of(dim, full)})

    @property
    def between_layers(self) -> Placement:
        """The placement of a replicated parameter that acts between layers, where ranks may have other tokens."""
        return ADDENDS if self.splits_tokens else REPLICATED

    @property
    def inside_layers(self) -> Placement:
        """The placement of a replicated parameter on a column layer's output; ranks have different features there."""
        return ADDENDS if self.size > 1 else REPLICATED


ALONE = TensorAxis()


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
    """One collective forward, another one backward.

    The result is a view. If a function returns a tensor that it has written to, torch 2.11 compiles it without its
    backward pass, and reports no error.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, there: Any, back: Any) -> torch.Tensor:
        """``there`` and ``back`` take (tensor, group); ``None`` leaves the tensor as it is."""
        ctx.group, ctx.back = group, back
        y = x if there is None else there(x, group)
        return y.view_as(y)

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
