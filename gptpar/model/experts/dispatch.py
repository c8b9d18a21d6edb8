"""Expert parallelism: sends each token to the processes that have its experts, and brings sums of outputs back.

Each rank of the expert axis has a range of the experts, and reads other tokens than the others. A token goes once to
each rank that has some of its experts. There, the outputs of these are weighed and summed, so that one vector comes
back. The host waits once, for the numbers of tokens and rows, which say how large messages and buffers are.

Legend: P ranks of the expert axis, E experts, e = E / P experts of this rank, N tokens of this rank, K experts of a
token, S copies of tokens that this rank sends, A own tokens and those that arrive, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gptpar.config.sections.mlp import SENT_TO_ALL, share_of_tokens
from gptpar.model.core_attention import not_compiled
from gptpar.model.experts.exchange import Exchange, Messages, arrived, sending, sent_back
from gptpar.model.experts.products import Places, added, places_of, scattered
from gptpar.model.experts.routing import counts_of
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import EXPERT
from gptpar.topology.placement import REPLICATED, Placement, Split

SIZES_BETWEEN = 32
"""Sizes of buffers are multiples of the mean size divided by this number, so that few sizes of memory are in use."""


LIMIT = 1.25
"""The most rows that a rank's experts get in a recorded step, over their mean."""


class RowLimit:
    """Limits the rows of a rank's experts, so that a recorded step needs no number on the host.

    Attributes:
        applies: whether rows are limited now.
        exceeded: bool scalar on the device: whether a layer of this rank had more rows.
    """

    def __init__(self, device: torch.device):
        self.applies, self.exceeded = False, torch.zeros((), dtype=torch.bool, device=device)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which rows are limited: a step, which is to be done again if they were too many."""
        self.applies = True
        try:
            yield
        finally:
            self.applies = False

    def limited(self, counts_e: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Counts of experts whose sum is at most ``num_rows``: the last experts get fewer rows."""
        ends_e = counts_e.cumsum(0)
        self.exceeded |= ends_e[-1] > num_rows
        return ends_e.clamp(max=num_rows).diff(prepend=ends_e.new_zeros(1))


@dataclass(frozen=True)
class ExpertAxis:
    """This process's place on the expert axis; by default it is alone there, and has all experts.

    Attributes:
        size: number of ranks that have different experts.
        rank: this process's position among them.
        group: of these ranks; ``None`` when alone.
        limit: of rows in recorded steps; ``None``: the host reads their number.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    limit: RowLimit | None = None

    @staticmethod
    def of(topology: Topology, *, limited: bool = False) -> ExpertAxis:
        """This process's place.

        Args:
            limited: whether steps are recorded.
        """
        limit = RowLimit(topology.device) if limited and topology.mesh.expert > 1 else None
        return ExpertAxis(topology.mesh.expert, topology.position(EXPERT), topology.group(EXPERT), limit)

    def split(self, num_experts: int) -> Placement:
        """Of a parameter whose first dimension counts experts."""
        own = num_experts // self.size
        return Placement({EXPERT: Split(0, num_experts, self.rank * own, own)}) if self.size > 1 else REPLICATED


ALL_EXPERTS = ExpertAxis()


class _Crossing(NamedTuple):
    """The way of a micro-batch's tokens to the ranks that have their experts, and to no others.

    Attributes:
        messages: of tokens.
        places: of the copies that are sent, sorted by rank.
        counts_e: rows of each of this rank's experts, of its own tokens and all that arrive.
        num_rows: at least the sum of these.
    """

    messages: Messages
    places: Places
    counts_e: torch.Tensor
    num_rows: int


@not_compiled
@torch.no_grad()
def _crossing_of(chosen_NK: torch.Tensor, num_experts: int, axis: ExpertAxis) -> _Crossing:
    """The host waits here while the device sorts. The first token goes to every rank, so that no message is empty."""
    (num_tokens, topk), size = chosen_NK.shape, axis.size
    goes_NP = torch.zeros(num_tokens, size + 1, dtype=torch.bool, device=chosen_NK.device)
    goes_NP = goes_NP.scatter_(1, chosen_NK // (num_experts // size), True)[:, :size]
    goes_NP[0] = True
    goes_NP[:, axis.rank] = False
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
    messages, places = Messages(sent, got, num_tokens, num_sent, num_got, axis.group), places.first(num_sent)
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
    crossing: _Crossing, axis: ExpertAxis, num_experts: int, *pairs: Sent
) -> tuple[torch.Tensor, torch.Tensor, Places]:
    """Tokens and weights that arrive, and the places of the copies for this rank's experts; it sorts meanwhile.

    Args:
        *pairs: choices, tokens and weights.
    """
    messages = crossing.messages
    chosen, x, weights = (sending(messages, *pair) for pair in pairs)
    experts_AK = _experts_here(arrived(*chosen), axis, num_experts, messages.num_filled)
    own = num_experts // axis.size
    places = places_of(experts_AK, own, crossing.counts_e, has_none=True).first(crossing.num_rows)
    x_AD, weights_AK = arrived(*x), arrived(*weights)
    _of_any_length(x_AD, weights_AK, places.tokens_M, places.rows_NK, places.choices_M, places.taken_NK)
    return x_AD, weights_AK, places


@not_compiled
def _arrive_from_all(
    tokens: Tokens, axis: ExpertAxis, num_experts: int, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Places]:
    """As :func:`_arrive`, of all tokens of all ranks. The host waits for the number of rows while the device sorts."""
    messages, exchange, x_AD = tokens
    own, both = num_experts // axis.size, (chosen_NK.to(torch.int32), weights_NK)
    chosen, weights = (sending(messages, *_to_all(rows, axis)) for rows in both)
    experts_AK = _experts_here(arrived(*chosen), axis, num_experts, messages.num_filled)
    numbers_e1 = torch.arange(own, dtype=experts_AK.dtype, device=experts_AK.device)[:, None]
    counts_e = (experts_AK.flatten() == numbers_e1).sum(1)  # few experts: no atomic additions
    limit, mean = axis.limit, chosen_NK.numel()
    if limit is not None and limit.applies:
        num_rows = _rounded_up(int(LIMIT * mean), mean)
        places = places_of(experts_AK, own, limit.limited(counts_e, num_rows), has_none=True).first(num_rows)
    else:
        read = _read_later(counts_e.sum())
        places = places_of(experts_AK, own, counts_e, has_none=True)
        places = places.first(_rounded_up(read(), mean))
    # The backward pass begins with the last of these: it sends the small one first, and then waits for that alone.
    x_AD, weights_AK = arrived(exchange, x_AD), arrived(*weights)
    _of_any_length(places.tokens_M, places.choices_M)
    return x_AD, weights_AK, places


@torch.no_grad()
def _experts_here(chosen_AK: torch.Tensor, axis: ExpertAxis, num_experts: int, num_filled: int) -> torch.Tensor:
    """[A, K] numbers of this rank's experts, from 0; e for those of other ranks, and for rows that hold no token."""
    own = num_experts // axis.size
    experts_AK = chosen_AK - axis.rank * own
    is_here_AK = (experts_AK >= 0) & (experts_AK < own)
    is_here_AK[num_filled:] = False
    return experts_AK.where(is_here_AK, own)


def _to_all(x: torch.Tensor, axis: ExpertAxis) -> Sent:
    """Own rows, and the same for each other rank."""
    return (x, x) if axis.size == 2 else _Repeated.apply(x, axis.size - 1)


class _Repeated(torch.autograd.Function):
    """A tensor, and copies of it below each other. All gradients are added up before the sum is rounded once.

    For a single copy, autograd's sum of two gradients is rounded once, too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copies: int) -> Sent:
        return x.view_as(x), x.repeat(copies, *[1] * (x.ndim - 1))

    @staticmethod
    def backward(ctx: Any, own: torch.Tensor, of_copies: torch.Tensor) -> Any:  # type: ignore[override]
        wide = torch.promote_types(own.dtype, torch.float32)
        return (own.to(wide) + of_copies.view(-1, *own.shape).sum(0, dtype=wide)).to(own.dtype), None


@not_compiled
def _return(messages: Messages, y_AD: torch.Tensor, *, any_length: bool) -> tuple[torch.Tensor, torch.Tensor]:
    y_ND, y_SD = sent_back(messages, y_AD)
    if any_length:
        _of_any_length(y_SD)
    return y_ND, y_SD


Tokens = tuple[Messages, Exchange, torch.Tensor]
"""Tokens on their way to all ranks."""
Sent = tuple[torch.Tensor, torch.Tensor]
"""This rank's rows, and those of them that other ranks get."""
Compute = Callable[[torch.Tensor, torch.Tensor, Places], torch.Tensor]
"""A function of tokens [A, D], the weights of their K experts, and the places of their copies; returns [A, D]."""


def sent_to_all(x_ND: torch.Tensor, axis: ExpertAxis, topk: int) -> Tokens | None:
    """Begin to send all tokens to all ranks, if most of them go there anyway; then no rank waits for their numbers."""
    return _sent_to_all(x_ND, axis) if share_of_tokens(axis.size, topk) >= SENT_TO_ALL else None


@not_compiled
def _sent_to_all(x_ND: torch.Tensor, axis: ExpertAxis) -> Tokens:
    num_tokens, others = len(x_ND), axis.size - 1
    sizes = [0 if rank == axis.rank else num_tokens for rank in range(axis.size)]
    messages = Messages(sizes, sizes, num_tokens, others * num_tokens, others * num_tokens, axis.group)
    return messages, *sending(messages, *_to_all(x_ND, axis))


def on_their_ranks(
    x_ND: torch.Tensor,
    tokens: Tokens | None,
    weights_NK: torch.Tensor,
    chosen_NK: torch.Tensor,
    num_experts: int,
    axis: ExpertAxis,
    compute: Compute,
) -> torch.Tensor:
    """[N, D] the weighted sums of experts' outputs; all ranks of the axis call this together.

    Args:
        tokens: what :func:`sent_to_all` has begun.
        chosen_NK: int64, experts of each token; the number E stands for no expert.
        compute: weighs and sums the outputs of this rank's experts for its own tokens and those that arrive.
    """
    if tokens is not None:
        y_AD = compute(*_arrive_from_all(tokens, axis, num_experts, chosen_NK, weights_NK))
        y_ND, y_SD = _return(tokens[0], y_AD, any_length=False)
        wide = torch.promote_types(y_ND.dtype, torch.float32)
        return (y_ND.to(wide) + y_SD.view(-1, *y_ND.shape).to(wide).sum(0)).to(y_ND.dtype)
    crossing = _crossing_of(chosen_NK, num_experts, axis)
    x_SD, weights_SK = (scattered(x, crossing.places) for x in (x_ND, weights_NK))
    chosen_NK = chosen_NK.to(torch.int32)
    chosen_SK = chosen_NK.index_select(0, crossing.places.tokens_M)
    pairs = (chosen_NK, chosen_SK), (x_ND, x_SD), (weights_NK, weights_SK)
    y_AD = compute(*_arrive(crossing, axis, num_experts, *pairs))
    y_ND, y_SD = _return(crossing.messages, y_AD, any_length=True)
    return added(y_SD, crossing.places, y_ND)


def crossing_cost(size: int, topk: int, width: int, batch: BatchShape) -> Cost:
    """What a token costs on its way to experts on ``size`` ranks and back, with even loads."""
    share = share_of_tokens(size, topk)
    to_all = share >= SENT_TO_ALL
    others = (size - 1) * (1 if to_all else share)  # copies that are sent
    copies = 1 + others
    moved = (3 * copies + 1) * width  # copies are made, and added
    # Where each expert's copies are, and the weights, for all; of copies to chosen ranks, their tokens and places.
    kept = topk * (copies * (9 + batch.statistic_size) - 8 - batch.statistic_size)
    kept += 0 if to_all else 8 * others + 9 * size
    buffers = copies + (0 if to_all and size == 2 else others)
    workspace = (topk + buffers) * width * batch.dtype.itemsize
    return Cost(forward=moved, backward=moved, exchanged=2 * others * width, kept=kept, workspace=workspace)
