"""Attention on several processes that exchange tokens for heads (Jacobs et al. 2023).

Legend: B batch, S sequence, H query heads, G key/value heads, K head width; c ranks of the context axis, T = S / c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gptpar.model.core_attention import CAUSAL, AttentionRule, core_attention, not_compiled
from gptpar.tensor_parallel.axis import Collective, all_to_all


@dataclass(frozen=True)
class HeadExchange:
    """Attention that exchanges tokens for heads.

    Where ranks are more than groups, several ranks get a group's keys and values, and divide its queries. The compiled
    layer packs and unpacks the messages, beside its other passes over queries, keys and output. A token's heads lie
    side by side in a message: attention reads what arrives, and its output leaves, without a copy (where B = 1).

    Attributes:
        size, rank, group: of the context axis.
        heads, groups: H and G before the exchange.
    """

    size: int
    rank: int
    group: dist.ProcessGroup
    heads: int
    groups: int

    @property
    def copies(self) -> int:
        """Number of copies of each group's keys and values that are sent, so that every rank gets equally many."""
        return self.size // math.gcd(self.groups, self.size)

    def pack(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of each rank's heads, [c, B, T, heads, K]."""
        if self.copies > 1:
            k_BGTK, v_BGTK = (x.repeat_interleave(self.copies, 1) for x in (k_BGTK, v_BGTK))
        parts = [x.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4) for x in (q_BHTK, k_BGTK, v_BGTK)]
        return torch.cat(parts, 3)

    @not_compiled  # its messages interrupt a compiled layer in any case
    def attend(self, packed: torch.Tensor, rule: AttentionRule = CAUSAL) -> torch.Tensor:
        """Compute :func:`core_attention` of what :meth:`pack` returns.

        Returns:
            y from each rank's heads, for this rank's tokens, [c, B, T, heads, K].
        """
        heads, groups = self.heads // self.size, self.groups * self.copies // self.size
        arrived = Collective.apply(packed, self.group, all_to_all, all_to_all)
        parts = arrived.split([heads, groups, groups], 3)
        q_BHSK, k_BGSK, v_BGSK = (x.permute(1, 3, 0, 2, 4).flatten(2, 3) for x in parts)
        if (dropout := rule.dropout) is not None:
            first = dropout.first_group * self.copies + self.rank * groups
            dropout = dropout._replace(first_group=first, num_groups=dropout.num_groups * self.copies)
        own_sinks = None if rule.sinks_H is None else rule.sinks_H.unflatten(0, (self.size, -1))[self.rank]
        y_BHSK = core_attention(q_BHSK, k_BGSK, v_BGSK, rule._replace(dropout=dropout, sinks_H=own_sinks))
        leaving = y_BHSK.unflatten(2, (self.size, -1)).permute(2, 0, 3, 1, 4)
        return Collective.apply(leaving, self.group, all_to_all, all_to_all)

    def unpack(self, y: torch.Tensor) -> torch.Tensor:
        """y_BHTK of all heads."""
        return y.permute(1, 0, 3, 2, 4).flatten(1, 2)
