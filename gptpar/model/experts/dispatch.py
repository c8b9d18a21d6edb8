"""Expert parallelism: sends tokens to the processes that have their experts, and brings the outputs back.

Each rank of the expert axis has a range of the experts, and reads other tokens than the others. Rows are sorted by
expert, so that those for one rank are neighbours. The receiver sorts what it got by expert, then by sender.

Legend: P ranks of the expert axis, E experts, e = E / P experts of this rank, M rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gptpar.model.attention_dropout import not_compiled
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import EXPERT
from gptpar.topology.placement import REPLICATED, Placement, Split

ORDER_BYTES = 16
"""Of a row: its place among those that arrived, and the inverse."""


@dataclass(frozen=True)
class ExpertAxis:
    """This process's place on the expert axis; by default it is alone there, and has all experts.

    Attributes:
        size: number of ranks that have different experts.
        rank: this process's position among them.
        group: of these ranks; ``None`` when alone.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(topology: Topology) -> ExpertAxis:
        """This process's place."""
        return ExpertAxis(topology.mesh.expert, topology.position(EXPERT), topology.group(EXPERT))

    def split(self, num_experts: int) -> Placement:
        """Of a parameter whose first dimension counts experts."""
        own = num_experts // self.size
        return Placement({EXPERT: Split(0, num_experts, self.rank * own, own)}) if self.size > 1 else REPLICATED


ALL_EXPERTS = ExpertAxis()


class _Exchange(torch.autograd.Function):
    """Rows to and from the ranks of a group; the backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x_MD: torch.Tensor, sent: list[int], got: list[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, got), group
        return _exchanged(x_MD, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> Any:  # type: ignore[override]
        sent, got = ctx.sizes
        return _exchanged(grad_MD, got, sent, ctx.group), None, None, None


def _exchanged(x_MD: torch.Tensor, sent: list[int], got: list[int], group: Any) -> torch.Tensor:
    y_MD = x_MD.new_empty(sum(got), x_MD.shape[1])
    dist.all_to_all_single(y_MD, x_MD.contiguous(), got, sent, group=group)
    return y_MD


class _Ordered(torch.autograd.Function):
    """Rows in another order, whose inverse is known."""

    @staticmethod
    def forward(ctx: Any, x_MD: torch.Tensor, order_M: torch.Tensor, inverse_M: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order_M, inverse_M)
        return x_MD.index_select(0, order_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> Any:  # type: ignore[override]
        order_M, inverse_M = ctx.saved_tensors
        return _Ordered.apply(grad_MD, inverse_M, order_M), None, None


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of rows, sorted by expert, and the number of rows of each of this rank's experts."""


@not_compiled
def on_their_ranks(x_MD: torch.Tensor, counts_E: torch.Tensor, axis: ExpertAxis, compute: Compute) -> torch.Tensor:
    """Outputs of experts, in the order of the rows; all ranks of the axis call this together.

    The host waits for the counts of rows, which say how much each rank sends.

    Args:
        x_MD: rows, sorted by expert; the last ones may be of no expert, whose outputs are 0.
        counts_E: int64, rows of each expert.
        compute: applies this rank's experts to the rows that it got.
    """
    theirs_E = torch.empty_like(counts_E)
    dist.all_to_all_single(theirs_E, counts_E, group=axis.group)
    sent_P, got_Pe = counts_E.view(axis.size, -1).sum(1), theirs_E.view(axis.size, -1)
    sent, got = torch.stack([sent_P, got_Pe.sum(1)]).tolist()
    num_of_none = len(x_MD) - sum(sent)
    x_MD = _Exchange.apply(x_MD[: sum(sent)], sent, got, axis.group)
    own_e = torch.arange(got_Pe.shape[1], device=x_MD.device)
    order_M = own_e.repeat(axis.size).repeat_interleave(theirs_E, output_size=sum(got)).argsort(stable=True)
    inverse_M = torch.empty_like(order_M)
    inverse_M[order_M] = torch.arange(len(order_M), device=x_MD.device)
    y_MD = compute(_Ordered.apply(x_MD, order_M, inverse_M), got_Pe.sum(0))
    y_MD = _Exchange.apply(_Ordered.apply(y_MD, inverse_M, order_M), got, sent, axis.group)
    return F.pad(y_MD, (0, 0, 0, num_of_none)) if num_of_none else y_MD


def with_rows_of_none(x_MD: torch.Tensor, counts_E: torch.Tensor, compute: Compute) -> torch.Tensor:
    """As ``compute``, where the last rows are of no expert: for the last one they are zeros, so that no host waits.

    Their weights are 0. So they add nothing to an output or a gradient.
    """
    taken = counts_E.sum()
    is_of_none_M = torch.arange(len(x_MD), device=x_MD.device) >= taken
    counts_E = torch.cat([counts_E[:-1], counts_E[-1:] + (len(x_MD) - taken)])
    return compute(x_MD.masked_fill(is_of_none_M[:, None], 0), counts_E)
