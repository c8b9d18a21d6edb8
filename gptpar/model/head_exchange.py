"""Attention on several processes that exchange tokens for heads (Jacobs et al. 2023), and nothing else.

Legend: B batch, S sequence, H query heads, G key/value heads, K head width; c ranks of the context axis, T = S / c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptpar.model.core_attention import AttentionDropout, core_attention, not_compiled
from gptpar.tensor_parallel.axis import Arrived, Message, Sent


@dataclass(frozen=True)
class HeadExchange:
    """Attention that exchanges tokens for heads.

    Where ranks are more than groups, several ranks get a group's keys and values, and divide its queries. A rank's
    heads come in two messages if its groups divide by two: one half is sent while attention computes the other. The
    compiled layer packs and unpacks, beside its other passes over queries, keys and output. A token's heads lie side by
    side in a message, so that attention reads what arrives, and its output leaves, without a copy (where B = 1).

    Attributes:
        size, rank, group: of the context axis.
        heads, groups: H and G before the exchange.
    """

    size: int
    rank: int
    group: Any
    heads: int
    groups: int

    @property
    def copies(self) -> int:
        """Number of copies of each group's keys and values that are sent."""
        return copies_of_groups(self.groups, self.size)

    @property
    def messages(self) -> int:
        """Number of messages M to a rank."""
        return 2 - self.groups * self.copies // self.size % 2

    def pack(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values of M messages to each rank, [c, B, T, heads of a message, K]."""
        if self.copies > 1:
            k_BGTK, v_BGTK = (x.repeat_interleave(self.copies, 1) for x in (k_BGTK, v_BGTK))
        parts = [x.unflatten(1, (self.size, self.messages, -1)) for x in (q_BHTK, k_BGTK, v_BGTK)]
        width, found = q_BHTK.shape[-1], []
        for m in range(self.messages):
            mine = torch.cat([x[:, :, m].permute(1, 0, 3, 2, 4).flatten(3) for x in parts], 3)
            found.append(mine.unflatten(3, (-1, width)))
        return found

    @not_compiled  # its messages interrupt a compiled layer in any case
    def attend(
        self,
        packed: Sequence[torch.Tensor],
        cu_seqlens: torch.Tensor | None = None,
        dropout: AttentionDropout | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Compute :func:`core_attention` of what :meth:`pack` returns, for all heads of this rank's tokens.

        Returns:
            y of M messages from each rank, [c, B, T, heads of a message, K].
        """
        size, width, parts = self.size, packed[0].shape[-1], self.size * self.messages
        heads, groups = self.heads // parts, self.groups * self.copies // parts
        there, back = ([Message(self.group) for _ in packed] for _ in range(2))
        arriving = [Sent.apply(x.flatten(3), message) for x, message in zip(packed, there, strict=True)]
        found = []
        for m, message in enumerate(there):
            place = self.rank * self.messages + m
            each = Arrived.apply(arriving[m], message).split([heads * width, groups * width, groups * width], 3)
            q_BHSK, k_BGSK, v_BGSK = (x.unflatten(3, (-1, width)).permute(1, 3, 0, 2, 4).flatten(2, 3) for x in each)
            own_dropout = None
            if dropout is not None:
                first = dropout.first_group * self.copies + place * groups
                own_dropout = dropout._replace(first_group=first, num_groups=dropout.num_groups * self.copies)
            own_sinks = None if sinks_H is None else sinks_H.unflatten(0, (parts, -1))[place]
            y_BHSK = core_attention(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, own_dropout, window, scale, own_sinks)
            found.append(Sent.apply(y_BHSK.unflatten(2, (size, -1)).permute(2, 0, 3, 1, 4), back[m]))
        return [Arrived.apply(y, message) for y, message in zip(found, back, strict=True)]

    def unpack(self, y: Sequence[torch.Tensor]) -> torch.Tensor:
        """y_BHTK of all heads."""
        return torch.stack([x.permute(1, 0, 3, 2, 4) for x in y], 2).flatten(1, 3)


def copies_of_groups(groups: int, size: int) -> int:
    """Number of copies of each group's keys and values that are sent, so that every rank gets equally many."""
    return size // math.gcd(groups, size)
