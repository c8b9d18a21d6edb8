"""Scaled dot-product attention (the kernel call), and the masks of documents and windows.

Another kernel, or attention that splits the sequence over processes, would replace :func:`core_attention`.

Legend: B batch, S sequence, G key/value heads ("groups") of this rank, Q query heads of one group, H = G x Q, K head
width.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange

from gptpar.model.attention_dropout import attention_with_dropout
from gptpar.model.dropout import LayerSeeds

MAX_KERNEL_WIDTH = 256
"""Channels of a head, at most, in flash attention's kernels; their number is a multiple of 8."""

if torch.backends.cuda.is_built():  # it brings torch's compiler, a second that a process on CPUs need not pay
    from torch.nn.attention.varlen import varlen_attn

    _GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    """Since torch 2.12 an argument allows grouped queries; torch 2.11 always does, and has no such argument."""


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities.

    Attributes:
        p: probability that a token is not seen.
        seeds: the layer's.
        first_group: the global number of this rank's first group.
        num_groups: number of groups on all ranks.
    """

    p: float
    seeds: LayerSeeds
    first_group: int
    num_groups: int


def seen_SS(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean mask_SS: a token sees itself and all earlier ones, or with a window only the last ``window`` of them."""
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_SS if window is None else causal_SS.triu(1 - window)


def document_ids(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """ids_BS, equal for tokens of one document and different for others."""
    places_N = torch.arange(batch * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, places_N, right=True).view(batch, length)


def document_mask(cu_seqlens: torch.Tensor, batch: int, length: int, window: int | None = None) -> torch.Tensor:
    """Boolean mask_B1SS: as :func:`seen_SS`, but a token sees its own document only."""
    ids_BS = document_ids(cu_seqlens, batch, length)
    same_BSS = ids_BS[:, :, None] == ids_BS[:, None, :]
    return (same_BSS & seen_SS(length, window, cu_seqlens.device))[:, None]


def attention_mask(
    batch: int, length: int, cu_seqlens: torch.Tensor | None, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Boolean mask [B or 1, 1, S, S]; ``None`` if every token sees itself and all earlier ones."""
    window = None if window is None or window >= length else window
    if cu_seqlens is not None:
        return document_mask(cu_seqlens, batch, length, window)
    return None if window is None else seen_SS(length, window, device)[None, None]


def has_varlen_kernel(device_type: str, dtype: torch.dtype, width: int) -> bool:
    """Whether flash attention computes windows and documents without a mask: on a GPU, in bf16, for such heads.

    Args:
        width: channels of a head.
    """
    return device_type == "cuda" and dtype == torch.bfloat16 and width % 8 == 0 and width <= MAX_KERNEL_WIDTH


def varlen_attention(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside documents, where :func:`has_varlen_kernel`; returns y_BHSK.

    The kernel skips blocks of keys that none of its queries sees (Dao 2023). For the arguments see
    :func:`core_attention`.
    """
    batch, _, length, _ = q_BHSK.shape
    q_NHK, k_NGK, v_NGK = (rearrange(x, "b h s k -> (b s) h k") for x in (q_BHSK, k_BGSK, v_BGSK))
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BHSK.device)
    how = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0), **_GROUPS}
    y_NHK = varlen_attn(q_NHK, k_NGK, v_NGK, cu_seqlens, cu_seqlens, length, length, **how)
    assert isinstance(y_NHK, torch.Tensor)  # with return_aux it would be a pair
    return rearrange(y_NHK, "(b s) h k -> b h s k", b=batch)


def one_call_a_document(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside documents on a CPU, where reading their lengths waits for nothing; returns y_BHSK."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = (rearrange(x, "b h s k -> 1 h (b s) k").split(lengths, 2) for x in (q_BHSK, k_BGSK, v_BGSK))
    of_documents = [core_attention(*parts_of_one, window=window, scale=scale) for parts_of_one in zip(*parts, strict=True)]
    return rearrange(torch.cat(of_documents, 2), "1 h (b s) k -> b h s k", b=len(q_BHSK))


def core_attention(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention, each group of query heads with its own key and value head; returns y_BHSK.

    Documents and windows cost what their tokens see, where flash attention has a kernel (:func:`has_varlen_kernel`);
    documents on a CPU, too. Else they become a mask in memory, which saves no computation; so they do with dropout.

    Args:
        cu_seqlens: where documents start among all samples' tokens, see :class:`gptpar.data.loader.MicroBatch`; tokens
            see their own document only. ``None``: a sample is one document.
        dropout: of the attention probabilities; ``None``: without dropout.
        window: how many tokens a token sees, itself among them; ``None``: all earlier ones.
        scale: factor of the scores; ``None``: 1 / sqrt(K).
    """
    batch, _, length, width = q_BHSK.shape
    window = None if window is None or window >= length else window
    device = q_BHSK.device
    if dropout is None and (cu_seqlens is not None or window is not None):
        if has_varlen_kernel(device.type, q_BHSK.dtype, width):
            return varlen_attention(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, window, scale)
        if cu_seqlens is not None and device.type == "cpu":
            return one_call_a_document(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, window, scale)
    mask_B1SS = attention_mask(batch, length, cu_seqlens, window, device)
    if dropout is not None:
        return attention_with_dropout(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, *dropout, scale=scale)
    return F.scaled_dot_product_attention(
        q_BHSK,
        k_BGSK,
        v_BGSK,
        attn_mask=mask_B1SS,
        is_causal=mask_B1SS is None,
        scale=scale,
        enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1],
    )
