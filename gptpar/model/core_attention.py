"""Scaled dot-product attention: the one place where queries meet keys.

Another kernel, or one that splits the sequence over processes, takes the place of :func:`core_attention`.

Legend: B batch, S sequence, G key/value heads ("groups") of this rank, Q query heads of one group, H = G x Q, K head
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from gptpar.model.attention_dropout import attention_with_dropout
from gptpar.model.dropout import LayerSeeds


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities.

    Attributes:
        p: probability of a token not to be seen.
        seeds: of the layer.
        first_group: the global number of this rank's first group.
        num_groups: of all ranks.
    """

    p: float
    seeds: LayerSeeds
    first_group: int
    num_groups: int


def document_mask(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Boolean mask_B1SS: a token sees itself and earlier tokens of its own document."""
    length = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=document_ids_BS.device).tril()
    return (same_BSS & causal_SS)[:, None]


def core_attention(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    document_ids_BS: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> torch.Tensor:
    """Causal attention, each group of query heads with its own key and value head; returns y_BHSK.

    Args:
        document_ids_BS: tokens see their own document only; ``None``: a sample is one document.
        dropout: ``None``: every token that may be seen is seen.
    """
    mask_B1SS = None if document_ids_BS is None else document_mask(document_ids_BS)
    if dropout is not None:
        return attention_with_dropout(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, *dropout)
    return F.scaled_dot_product_attention(
        q_BHSK,
        k_BGSK,
        v_BGSK,
        attn_mask=mask_B1SS,
        is_causal=mask_B1SS is None,
        enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1],
    )
