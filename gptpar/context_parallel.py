"""Context parallelism: ranks divide the tokens of every sample, and exchange them in attention alone.

All other layers treat each token by itself. There are two ways for a token to see those of other ranks:

- ``a2a`` (Jacobs et al. 2023): before attention each rank gives away its tokens for some heads, and gets all tokens for
  its own heads; afterwards back. Attention is that of one process: any kernel, documents, windows and dropout.
- ``allgather`` (Grattafiori et al. 2024): each rank keeps its queries, and gathers all keys and values. A rank has the
  chunks r and 2c - 1 - r of 2c chunks, so that all ranks' tokens see equally many others.

Legend: B batch, S sequence, H query heads, G key/value heads, K head width; c ranks of the context axis, T = S / c.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gptpar.data.loader import MicroBatch
from gptpar.model.attention import Attention
from gptpar.model.attention_dropout import not_compiled
from gptpar.model.core_attention import AttentionDropout, core_attention, document_ids
from gptpar.model.experts.routing import Router
from gptpar.model.varlen_attention import has_varlen_kernel, varlen_attention
from gptpar.tensor_parallel.collectives import Collective, all_to_all, gather, reduce_scatter
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import CONTEXT


@dataclass(frozen=True)
class ContextSplit:
    """Which of a sample's tokens a rank has.

    Attributes:
        size, rank: of the context axis, and this process's position on it.
        gathers: whether keys and values are gathered, for which tokens are balanced.
    """

    size: int = 1
    rank: int = 0
    gathers: bool = False

    @staticmethod
    def of(topology: Topology, comm_type: str) -> ContextSplit:
        """This process's, by ``--cp-comm-type``."""
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
        if self.size == 1:
            return batch
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
    """Let the attention layers among some modules see the tokens of all ranks, and routers balance whole samples."""
    group = topology.group(CONTEXT)
    attend = partial(attend_by_gathering if split.gathers else attend_by_heads, split, group)
    for module in modules:
        if group is not None and isinstance(module, Attention):
            module.attend = attend
        elif isinstance(module, Router):
            module.context = group


@not_compiled  # its messages interrupt a compiled layer in any case
def attend_by_heads(
    split: ContextSplit,
    group: dist.ProcessGroup,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As :func:`core_attention`, by exchanging tokens for heads; returns y_BHTK.

    Where ranks are more than groups, several ranks get a group's keys and values, and divide its queries.
    """
    size = split.size
    copies = copies_of_groups(k_BGTK.shape[1], size)
    if copies > 1:
        k_BGTK, v_BGTK = (x.repeat_interleave(copies, 1) for x in (k_BGTK, v_BGTK))
    parts = [x.unflatten(1, (size, -1)) for x in (q_BHTK, k_BGTK, v_BGTK)]
    lengths = [part.shape[2] for part in parts]
    packed = torch.cat(parts, 2).transpose(0, 1)  # [c, B, heads of a rank, T, K]
    exchanged = Collective.apply(packed, group, all_to_all, all_to_all)
    q_BHSK, k_BGSK, v_BGSK = exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3).split(lengths, 1)
    if dropout is not None:
        first = dropout.first_group * copies + split.rank * lengths[1]
        dropout = dropout._replace(first_group=first, num_groups=dropout.num_groups * copies)
    y_BHSK = core_attention(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, dropout, window, scale)
    back = Collective.apply(y_BHSK.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4), group, all_to_all, all_to_all)
    return back.transpose(0, 1).flatten(1, 2)


def copies_of_groups(groups: int, size: int) -> int:
    """How often each group's keys and values are sent, so that every rank gets equally many."""
    return size // math.gcd(groups, size)


@not_compiled
def attend_by_gathering(
    split: ContextSplit,
    group: dist.ProcessGroup,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As :func:`core_attention`, with the keys and values of all ranks; returns y_BHTK."""
    assert dropout is None, "checks refuse dropout of attention where keys and values are gathered"
    half, length = q_BHTK.shape[2] // 2, q_BHTK.shape[2] * split.size
    chunks = torch.stack([k_BGTK, v_BGTK]).unflatten(-2, (2, half))
    gathered = Collective.apply(chunks[None], group, gather, reduce_scatter)  # [c, 2, B, G, 2, T / 2, K]
    early, late = gathered.movedim(0, -3).unbind(3)  # [2, B, G, c, T / 2, K]: chunks 0 to c - 1, and 2c - 1 down to c
    keys, values = torch.cat([early, late.flip(-3)], -3).flatten(-3, -2)
    found = []
    for q, (start, stop) in zip(q_BHTK.split(half, 2), split.ranges(length), strict=True):
        seen = q, keys[:, :, :stop], values[:, :, :stop]
        found.append(_of_chunk(*seen, start, length, cu_seqlens, window, scale))
    return torch.cat(found, 2)


def _of_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    length: int,
    cu_seqlens: torch.Tensor | None,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of the queries at the end of a sample's first tokens to the keys and values of all these tokens.

    Args:
        start: position of the first query.
        length: S.
    """
    batch, stop, device = len(q), k.shape[2], q.device
    if has_varlen_kernel(device.type, q.dtype, q.shape[-1]):
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        samples, places = cu_seqlens // length, cu_seqlens % length
        of_q, of_k = (samples * (stop - first) + (places - first).clamp(0, stop - first) for first in (start, 0))
        return varlen_attention(q, k, v, of_q, window, scale, cu_keys=of_k)
    queries, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(stop, device=device)
    mask = keys <= queries
    if window is not None:
        mask = mask & (queries - keys < window)
    mask = mask[None]
    if cu_seqlens is not None:
        ids_BS = document_ids(cu_seqlens, batch, length)[:, :stop]
        mask = mask & (ids_BS[:, start:, None] == ids_BS[:, None])
    how: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], **how)
