"""Context parallelism: ranks divide the tokens of every sample, and exchange them in attention alone.

All other layers treat each token by itself. There are two ways for a token to see those of other ranks:

- ``a2a`` (Jacobs et al. 2023): before attention each rank gives away its tokens for some heads, and gets all tokens for
  its own heads; afterwards back (:mod:`gptpar.model.head_exchange`). Attention is that of one process: any kernel,
  documents, windows and dropout.
- ``allgather`` (Grattafiori et al. 2024): each rank keeps its queries, and gathers all keys and values, for some heads
  at a time, and in the backward pass again. A rank has the chunks r and 2c - 1 - r of 2c chunks, so that all ranks'
  tokens see equally many others.

Legend: B batch, S sequence, H query heads, G key/value heads, K head width; c ranks of the context axis, T = S / c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gptpar.config.sections.parallel import groups_gathered
from gptpar.data.loader import MicroBatch
from gptpar.model.attention import Attention
from gptpar.model.attention_sinks import attention_to_seen
from gptpar.model.core_attention import CAUSAL, AttentionRule, core_attention, document_ids, not_compiled
from gptpar.model.experts.routing import Router
from gptpar.model.head_exchange import HeadExchange
from gptpar.model.varlen_attention import has_varlen_kernel, varlen_attention
from gptpar.tensor_parallel.axis import gather, reduce_scatter
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import CONTEXT


@dataclass(frozen=True)
class ContextSplit:
    """Which of a sample's tokens a rank has.

    Attributes:
        size, rank: size of the context axis, and this process's position on it.
        gathers: whether keys and values are gathered, for which tokens are balanced.
    """

    size: int = 1
    rank: int = 0
    gathers: bool = False

    @staticmethod
    def of(topology: Topology, comm_type: str) -> ContextSplit:
        """This process's place on the context axis, with the exchange that ``--cp-comm-type`` names."""
        return ContextSplit(topology.mesh.context, topology.position(CONTEXT), comm_type == "allgather")

    def ranges(self, length: int) -> list[tuple[int, int]]:
        """The ranges [start, stop) of this rank's tokens in a sample of S tokens."""
        numbers = (self.rank, 2 * self.size - 1 - self.rank) if self.gathers else (self.rank,)
        step = length // (self.size * len(numbers))
        return [(number * step, (number + 1) * step) for number in numbers]

    def own(self, x_BS: torch.Tensor) -> torch.Tensor:
        """This rank's tokens x_BT, in pinned memory if all are."""
        parts = [x_BS[:, start:stop] for start, stop in self.ranges(x_BS.shape[1])]
        own_BT = torch.cat(parts, 1)
        return own_BT.pin_memory() if x_BS.is_pinned() else own_BT

    def places(self, batch: int, length: int) -> torch.Tensor:
        """The numbers of this rank's tokens among all of a micro-batch's, int64 [B, T]."""
        return self.own(torch.arange(batch * length).view(batch, length))

    def own_batch(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens with their positions; ``cu_seqlens`` remains that of whole samples.

        The mean of all ranks' losses is the mean over the tokens that count in the whole micro-batch.
        """
        positions_BS, mask_BS = batch.position_ids_BS, batch.loss_mask_BS
        if positions_BS is None:
            positions_BS = torch.arange(batch.tokens_BS.shape[1]).repeat(len(batch.tokens_BS), 1)
            positions_BS = positions_BS.pin_memory() if batch.tokens_BS.is_pinned() else positions_BS
        return MicroBatch(
            self.own(batch.tokens_BS),
            self.own(batch.labels_BS),
            None if mask_BS is None else self.own(mask_BS),
            self.own(positions_BS),
            batch.cu_seqlens,
            None if mask_BS is None else mask_BS.sum(dtype=torch.float64) / self.size,
        )


def divide_samples(modules: Iterable[nn.Module], topology: Topology, split: ContextSplit) -> None:
    """Let the attention layers among some modules see the tokens of all ranks, and routers judge whole samples."""
    group = topology.group(CONTEXT)
    for module in modules:
        if group is not None and isinstance(module, Attention):
            if split.gathers:
                module.attend = partial(attend_by_gathering, split, group)
            else:
                groups = module.num_groups // module.axis.size
                heads = groups * module.queries_per_group
                module.exchange = HeadExchange(split.size, split.rank, group, heads, groups)
        elif group is not None and isinstance(module, Router):
            module.context = DividedSamples(split, group)


@dataclass(frozen=True)
class DividedSamples:
    """The ranks that divide the tokens of samples, for a router; N are tokens of all samples of a micro-batch."""

    split: ContextSplit
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.split.size

    @not_compiled
    def summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Over the ranks."""
        dist.all_reduce(counts, group=self.group)
        return counts

    def whole(self, x_ND: torch.Tensor, seq_length: int) -> torch.Tensor:
        """All ranks' rows, as rows of whole samples' tokens."""
        ranks_cBTD = gather(x_ND, self.group).unflatten(0, (self.size, -1, seq_length // self.size))
        whole_BSD = x_ND.new_empty(ranks_cBTD.shape[1], seq_length, x_ND.shape[1])
        for rank, own_BTD in enumerate(ranks_cBTD):
            ranges = replace(self.split, rank=rank).ranges(seq_length)
            for (start, stop), part in zip(ranges, own_BTD.chunk(len(ranges), 1), strict=True):
                whole_BSD[:, start:stop] = part
        return whole_BSD.flatten(0, 1)

    def own(self, x_ND: torch.Tensor, seq_length: int) -> torch.Tensor:
        """The rows of this rank's tokens; the inverse of :meth:`whole`."""
        return self.split.own(x_ND.unflatten(0, (-1, seq_length))).flatten(0, 1)


@not_compiled
def attend_by_gathering(
    split: ContextSplit,
    group: dist.ProcessGroup,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    rule: AttentionRule = CAUSAL,
) -> torch.Tensor:
    """Compute :func:`core_attention` with all ranks' keys and values, some groups at a time; returns y_BHTK.

    Dropout's mask on a GPU is that of a call with all of a sample's queries: those of other ranks are zeros there, and
    every rank computes the whole attention.
    """
    batch, groups, tokens, width = k_BGTK.shape
    length, queries = tokens * split.size, q_BHTK.shape[1] // groups
    at_once = groups_gathered(groups, 2 * batch * length * width * k_BGTK.element_size())
    found, parts = [], (q_BHTK.split(at_once * queries, 1), k_BGTK.split(at_once, 1), v_BGTK.split(at_once, 1))
    sinks = [None] * len(parts[1]) if rule.sinks_H is None else rule.sinks_H.split(at_once * queries)
    for number, (q, k, v, sinks_h) in enumerate(zip(*parts, sinks, strict=True)):
        attend, stops = partial(_of_chunks, split, rule), [stop for _, stop in split.ranges(length)]
        if (dropout := rule.dropout) is not None:
            of_groups = dropout._replace(first_group=dropout.first_group + number * at_once)
            attend, stops = partial(_of_whole, split, rule._replace(dropout=of_groups)), [length]
        found.append(_GatheredAgain.apply(attend, stops, group, q, sinks_h, k, v))
    return torch.cat(found, 1)


class _GatheredAgain(torch.autograd.Function):
    """Attention to gathered keys and values, which the backward pass gathers again: only a rank's own are kept.

    Attention is differentiated by itself. What it saves is this function's to save, so that recomputation and other
    hooks see it; but of gathered tensors only the shapes are kept.
    """

    @staticmethod
    def forward(ctx: Any, attend: Any, stops: Any, group: Any, q: Any, sinks: Any, k: Any, v: Any) -> torch.Tensor:
        """``attend`` takes q_BHTK, sinks_H and, for each of ``stops``, k_BGSK and v_BGSK of a sample's first tokens."""
        saved = _Saved(_gathered(k, v, stops, group))
        own = (q,) if sinks is None else (q, sinks)
        leaves = [x.detach().requires_grad_() for x in (*own, *(x.transpose(1, 2) for x in saved.gathered))]
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
            y = attend(leaves[0], None if sinks is None else leaves[1], *leaves[len(own) :])
        ctx.save_for_backward(k, v, *saved.others)
        ctx.stops, ctx.group, ctx.saved, ctx.y, ctx.leaves = stops, group, saved, y, leaves
        result = y.detach()
        saved.forget()
        for x in (y, *leaves):  # nodes of a graph from here on
            x.data = x.new_empty(1).expand(x.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """The gradients of q, sinks, k and v."""
        k, v, *ctx.saved.others = ctx.saved_tensors
        ctx.saved.gathered = _gathered(k, v, ctx.stops, ctx.group)
        d_q, *d_others = torch.autograd.grad(ctx.y, ctx.leaves, grad, retain_graph=True)
        d_sinks = d_others.pop(0) if len(d_others) > 2 * len(ctx.stops) else None
        ctx.saved.forget()
        length = k.shape[2] * ctx.group.size()
        return None, None, None, d_q, d_sinks, *_scattered([x.transpose(1, 2) for x in d_others], length, ctx.group)


class _Saved:
    """Tensors and sizes that attention saves for its backward pass.

    Attributes:
        gathered: the gathered keys and values; they are gathered again, and not saved.
        others: the saved tensors that are no views of these.
    """

    def __init__(self, gathered: list[torch.Tensor]):
        self.gathered, self.others = gathered, list[torch.Tensor]()

    def pack(self, x: torch.Tensor) -> Any:
        for number, one in enumerate(self.gathered):
            if x.untyped_storage().data_ptr() == one.untyped_storage().data_ptr():
                return number, x.shape, x.stride(), x.storage_offset()
        self.others.append(x.detach())  # x may be a leaf, whose data is replaced at the end of the forward pass
        return len(self.others) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, int):
            return self.others[packed]
        number, *view = packed
        return self.gathered[number].as_strided(*view)

    def forget(self) -> None:
        """Keep no tensor."""
        self.gathered, self.others = [], []


def _gathered(
    k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, stops: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """k_BSGK and v_BSGK of a sample's first tokens, for each number of tokens: as kernels read them, contiguous."""
    own = torch.stack([k_BGTK, v_BGTK]).transpose(2, 3).unflatten(2, (2, -1))
    early, late = gather(own[None], group).movedim(0, 2).unbind(3)  # chunks 0 to c - 1, and 2c - 1 down to c
    whole = torch.cat([early, late.flip(2)], 2).flatten(2, 3)
    return [x[:, :stop].contiguous() for stop in stops for x in whole]


def _scattered(
    gathered: Sequence[torch.Tensor], length: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of this rank's k_BGTK and v_BGTK, from those of what :func:`_gathered` returns."""
    first = gathered[0]
    whole = first.new_zeros(2, len(first), length, *first.shape[2:])
    for number, x in enumerate(gathered):
        whole[number % 2, :, : x.shape[1]] += x
    early, late = whole.unflatten(2, (2, group.size(), -1)).unbind(2)
    own = reduce_scatter(torch.stack([early, late.flip(2)], 3).movedim(2, 0), group)[0]
    d_k, d_v = own.flatten(2, 3).transpose(2, 3)
    return d_k, d_v


def _of_whole(
    split: ContextSplit, rule: AttentionRule, q: torch.Tensor, sinks_H: None, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention of this rank's queries, in a call with those of all tokens."""
    (first, mid), (last, end) = split.ranges(k.shape[2])
    early, late = q.split(mid - first, 2)
    early, late = F.pad(early, (0, 0, first, last - mid)), F.pad(late, (0, 0, 0, k.shape[2] - end))
    y = core_attention(torch.cat([early, late], 2), k, v, rule)
    return torch.cat([y[:, :, first:mid], y[:, :, last:end]], 2)


def _of_chunks(
    split: ContextSplit, rule: AttentionRule, q: torch.Tensor, sinks_H: torch.Tensor | None, *seen: torch.Tensor
) -> torch.Tensor:
    """Attention of this rank's two chunks of queries, each with the keys and values up to its own."""
    length, found, rule = q.shape[2] * split.size, [], rule._replace(sinks_H=sinks_H)
    for q_chunk, k, v, (start, _) in zip(q.chunk(2, 2), seen[::2], seen[1::2], split.ranges(length), strict=True):
        found.append(_of_chunk(q_chunk, k, v, start, length, rule))
    return torch.cat(found, 2)


def _of_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, length: int, rule: AttentionRule
) -> torch.Tensor:
    """Attention of the queries at the end of a sample's first tokens to the keys and values of all these tokens.

    Args:
        start: position of the first query.
        length: S.
    """
    (cu_seqlens, _, window, scale, sinks_H), batch, stop, device = rule, len(q), k.shape[2], q.device
    if has_varlen_kernel(device.type, q.dtype, q.shape[-1]):
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        samples, places = cu_seqlens // length, cu_seqlens % length
        of_q, of_k = (samples * (stop - first) + (places - first).clamp(0, stop - first) for first in (start, 0))
        return varlen_attention(q, k, v, of_q, window, scale, cu_keys=of_k, sinks_H=sinks_H)
    queries, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(stop, device=device)
    mask = keys <= queries
    if window is not None:
        mask = mask & (queries - keys < window)
    mask = mask[None]
    if cu_seqlens is not None:
        ids_BS = document_ids(cu_seqlens, batch, length)[:, :stop]
        mask = mask & (ids_BS[:, start:, None] == ids_BS[:, None])
    return attention_to_seen(q, k, v, mask[:, None], scale, sinks_H)
