"""Caches keys and values of the tokens that a model has read, so that a next token costs one token's work.

Each row of a batch is a text. A token's position in the text is its place in the cache. So rows of different lengths
need no padding: a token sees the places up to its own, and no later one is read.

Legend: R rows of the cache, B rows of a call, S sequence, T positions of a row, G key/value heads, H query heads,
K head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gptpar.model.attention import Attention
from gptpar.model.attention_sinks import attention_to_seen
from gptpar.model.core_attention import AttentionRule, core_attention


@dataclass
class CachePlace:
    """The place in the cache of the next forward pass's tokens; all layers share it.

    Attributes:
        rows: the cache's rows that are read and written; ``None``: the cache is not used.
        positions_BS: int64, each token's position in its text; ``None``: these tokens are the first of their texts.
        length: number of places that are read, more than any of ``positions_BS``.
    """

    rows: slice | None = None
    positions_BS: torch.Tensor | None = None
    length: int = 0


class KeyValueCache:
    """One layer's keys and values; a layer calls it instead of :func:`core_attention`.

    Args:
        rows: number of texts.
        length: positions of each text.
        place: the place of the next forward pass's tokens.
    """

    def __init__(self, rows: int, length: int, place: CachePlace):
        self._shape, self._place = (rows, length), place
        self._keys_RGTK: torch.Tensor | None = None
        self._values_RGTK: torch.Tensor | None = None

    def __call__(
        self, q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Returns y_BHSK; documents and dropout, which only training has, are ignored."""
        place, rule = self._place, rule._replace(cu_seqlens=None, dropout=None)
        if place.rows is None:
            return core_attention(q_BHSK, k_BGSK, v_BGSK, rule)
        keys_BGTK, values_BGTK = self._memory(k_BGSK, place.rows)
        if place.positions_BS is None:
            length = k_BGSK.shape[2]
            keys_BGTK[:, :, :length], values_BGTK[:, :, :length] = k_BGSK, v_BGSK
            return core_attention(q_BHSK, k_BGSK, v_BGSK, rule)
        rows_B1 = torch.arange(len(keys_BGTK), device=k_BGSK.device)[:, None]
        keys_BGTK[rows_B1, :, place.positions_BS] = k_BGSK.transpose(1, 2)
        values_BGTK[rows_B1, :, place.positions_BS] = v_BGSK.transpose(1, 2)
        read = keys_BGTK[:, :, : place.length], values_BGTK[:, :, : place.length]
        seen = seen_B1ST(place.positions_BS, place.length, rule.window)
        return attention_to_seen(q_BHSK, *read, seen, rule.scale, rule.sinks_H)

    def _memory(self, k_BGSK: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self._keys_RGTK is None or self._values_RGTK is None:
            (num_rows, length), (_, groups, _, width) = self._shape, k_BGSK.shape
            self._keys_RGTK, self._values_RGTK = k_BGSK.new_zeros(2, num_rows, groups, length, width)
        return self._keys_RGTK[rows], self._values_RGTK[rows]


def seen_B1ST(positions_BS: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Boolean mask: a token sees the positions up to its own, or with a window only the last ``window`` of them."""
    places_T = torch.arange(length, device=positions_BS.device)
    own_BS1 = positions_BS[:, :, None]
    seen_BST = places_T <= own_BS1
    return (seen_BST if window is None else seen_BST & (places_T > own_BS1 - window))[:, None]


@contextlib.contextmanager
def cached(model: nn.Module, rows: int, length: int) -> Iterator[CachePlace]:
    """Give each attention layer of a model a cache, for the time of a ``with`` block.

    Args:
        rows: number of texts.
        length: positions of each text.
    """
    place = CachePlace()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = KeyValueCache(rows, length, place)
    try:
        yield place
    finally:
        for layer, attend in zip(layers, before, strict=True):
            layer.attend = attend
