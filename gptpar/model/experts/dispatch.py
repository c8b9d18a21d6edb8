"""Expert parallelism: sends each token to the processes that have its experts, and brings sums of outputs back.

Each rank of the expert axis has a range of the experts, and reads other tokens than the others. A token goes once to
each rank that has some of its experts. There, the outputs of these are weighed and summed, so that one vector comes
back. The host waits once, for the numbers of tokens and rows, which say how large messages and buffers are.

Legend: P ranks of the expert axis, E experts, e = E / P experts of this rank, N tokens of this rank, K experts of a
token, S copies of tokens that this rank sends, A tokens that arrive, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gptpar.model.core_attention import not_compiled
from gptpar.model.experts.products import Places, added, places_of, scattered
from gptpar.model.experts.routing import counts_of
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import EXPERT
from gptpar.topology.placement import REPLICATED, Placement, Split

SIZES_BETWEEN = 32
"""Buffers grow in steps of the mean size through this number, so that the same few sizes of memory are reused."""


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


class _Messages(NamedTuple):
    """How many rows go to each rank and come from it, and the lengths of the tensors that hold them.

    The last rows of a tensor may be in no message.
    """

    sent: list[int]
    got: list[int]
    num_sent: int
    num_got: int
    group: Any

    @property
    def back(self) -> _Messages:
        """The messages in the other direction."""
        return self._replace(sent=self.got, got=self.sent, num_sent=self.num_got, num_got=self.num_sent)

    def start(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Send rows; what this returns holds those of other ranks as soon as the second object's ``wait`` returns."""
        y = x.new_empty(self.num_got, *x.shape[1:])
        parts = y[: sum(self.got)], x.contiguous()[: sum(self.sent)]
        return y, dist.all_to_all_single(*parts, self.got, self.sent, group=self.group, async_op=True)


class _Exchanged(torch.autograd.Function):
    """Tensors that ranks have sent to each other; the backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, messages: _Messages, arrived: Sequence[torch.Tensor], *sent: torch.Tensor) -> Any:
        ctx.messages = messages
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *_arrived([ctx.messages.back.start(grad) for grad in grads])


def _arrived(started: Sequence[tuple[torch.Tensor, Any]]) -> list[torch.Tensor]:
    for _, work in started:
        work.wait()
    return [y for y, _ in started]


class _Crossing(NamedTuple):
    """The way of a micro-batch's tokens to their experts.

    Attributes:
        messages: of tokens.
        places: of the copies that are sent, sorted by rank.
        counts_e: rows of each of this rank's experts, of all tokens that arrive.
        num_rows: at least the sum of these.
    """

    messages: _Messages
    places: Places
    counts_e: torch.Tensor
    num_rows: int


@not_compiled
@torch.no_grad()
def _crossing_of(chosen_NK: torch.Tensor, num_experts: int, axis: ExpertAxis) -> _Crossing:
    """The host waits here while the device sorts. Each token goes to its own rank, too, so that no message is empty."""
    (num_tokens, topk), size = chosen_NK.shape, axis.size
    goes_NP = torch.zeros(num_tokens, size + 1, dtype=torch.bool, device=chosen_NK.device)
    goes_NP = goes_NP.scatter_(1, chosen_NK // (num_experts // size), True)[:, :size]
    goes_NP[:, axis.rank] = True
    sent_P, counts_E = goes_NP.sum(0), counts_of(chosen_NK[None], num_experts + 1)[0, :num_experts]
    numbers = torch.cat([sent_P[:, None], counts_E.view(size, -1)], 1)
    theirs = torch.empty_like(numbers)
    dist.all_to_all_single(theirs, numbers, group=axis.group)
    got_P, counts_Pe = theirs[:, 0], theirs[:, 1:]
    read = _read_later(torch.stack([sent_P, got_P, counts_Pe.sum(1)]))
    ranks_P = torch.arange(size, dtype=torch.int32, device=chosen_NK.device)
    places, counts_e = places_of(ranks_P.where(goes_NP, size), size, sent_P, has_none=True), counts_Pe.sum(0)
    sent, got, rows = read()
    num_sent, num_got = (_rounded_up(sum(tokens), num_tokens) for tokens in (sent, got))
    num_sent = min(num_sent, num_tokens * size)
    messages, places = _Messages(sent, got, num_sent, num_got, axis.group), places.first(num_sent)
    _of_any_length(places.tokens_M)
    return _Crossing(messages, places, counts_e, _rounded_up(sum(rows), num_tokens * topk))


def _read_later(x: torch.Tensor) -> Callable[[], Any]:
    """Begin to copy numbers to the host; the call waits for them, and not for what the device does afterwards."""
    if not x.is_cuda:
        return x.tolist
    host, event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True), torch.cuda.Event()
    event.record()

    def read() -> Any:
        event.synchronize()
        return host.tolist()

    return read


def _rounded_up(number: int, mean: int) -> int:
    step = max(1, mean // SIZES_BETWEEN)
    return max(1, -(-number // step)) * step


def _of_any_length(*tensors: torch.Tensor | None) -> None:
    """A compiler makes code for every length of these tensors at once."""
    for x in tensors:
        if x is not None and x.is_cuda:
            torch._dynamo.maybe_mark_dynamic(x, 0)


@not_compiled
def _arrive(
    crossing: _Crossing, axis: ExpertAxis, num_experts: int, chosen_SK: torch.Tensor, *sent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Places]:
    """Tokens and weights that arrive, and the places of the copies for this rank's experts; it sorts meanwhile."""
    messages, own = crossing.messages, num_experts // axis.size
    chosen, *others = [messages.start(x.detach()) for x in (chosen_SK, *sent)]
    (chosen_AK,) = _arrived([chosen])
    experts_AK = chosen_AK - axis.rank * own
    is_here_AK = (experts_AK >= 0) & (experts_AK < own)
    is_here_AK[sum(messages.got) :] = False
    places = places_of(experts_AK.where(is_here_AK, own), own, crossing.counts_e, has_none=True)
    places = places.first(crossing.num_rows)
    x_AD, weights_AK = _Exchanged.apply(messages, _arrived(others), *sent)
    _of_any_length(x_AD, weights_AK, places.tokens_M, places.rows_NK, places.choices_M, places.taken_NK)
    return x_AD, weights_AK, places


@not_compiled
def _return(messages: _Messages, y_AD: torch.Tensor) -> torch.Tensor:
    (y_SD,) = _Exchanged.apply(messages.back, _arrived([messages.back.start(y_AD.detach())]), y_AD)
    _of_any_length(y_SD)
    return y_SD


Compute = Callable[[torch.Tensor, torch.Tensor, Places], torch.Tensor]
"""A function of tokens [A, D], the weights of their K experts, and the places of their copies; returns [A, D]."""


def on_their_ranks(
    x_ND: torch.Tensor,
    weights_NK: torch.Tensor,
    chosen_NK: torch.Tensor,
    num_experts: int,
    axis: ExpertAxis,
    compute: Compute,
) -> torch.Tensor:
    """[N, D] the weighted sums of experts' outputs; all ranks of the axis call this together.

    Args:
        chosen_NK: int64, experts of each token; the number E is none.
        compute: weighs and sums the outputs of this rank's experts for tokens that arrive.
    """
    crossing = _crossing_of(chosen_NK, num_experts, axis)
    x_SD, weights_SK = (scattered(x, crossing.places) for x in (x_ND, weights_NK))
    chosen_SK = chosen_NK.to(torch.int32).index_select(0, crossing.places.tokens_M)
    arrived = _arrive(crossing, axis, num_experts, chosen_SK, x_SD, weights_SK)
    return added(_return(crossing.messages, compute(*arrived)), crossing.places)


def crossing_cost(size: int, topk: int, width: int, batch: BatchShape) -> Cost:
    """What a token costs on its way to experts on ``size`` ranks and back, with even loads."""
    copies = 1 + (size - 1) * (1 - (1 - 1 / size) ** topk)
    moved = (3 * copies + 1) * width  # copies are made, and added
    # Of copies that are sent, their tokens, and where each rank's is; where each expert's is, and the weights, for all.
    kept = 8 * copies + 9 * size + topk * (copies * (9 + batch.statistic_size) - 8 - batch.statistic_size)
    workspace = (topk + 2 * copies) * width * batch.dtype.itemsize
    return Cost(forward=moved, backward=moved, exchanged=2 * (copies - 1) * width, kept=kept, workspace=workspace)
