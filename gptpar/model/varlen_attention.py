"""Flash attention inside documents and windows, without a mask in memory (sequences of variable length).

Legend: B batch, S sequence, N = B x S tokens, G key/value heads, H query heads, K head width.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from einops import rearrange

from gptpar.model.attention_sinks import varlen_attention_with_sinks

MAX_KERNEL_WIDTH = 256
"""Channels of a head, at most, in flash attention's kernels; their number is a multiple of 8."""

if torch.backends.cuda.is_built():  # it brings torch's compiler, a second that a process on CPUs need not pay
    from torch.nn.attention.varlen import varlen_attn

    _GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    """Since torch 2.12 an argument allows grouped queries; torch 2.11 always does, and has no such argument."""


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
    dropout_p: float = 0.0,
    cu_keys: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention where :func:`has_varlen_kernel`; returns y_BHSK.

    The kernel skips blocks of keys that none of its queries sees (Dao 2023).

    Args:
        cu_seqlens: see :func:`gptpar.model.core_attention.core_attention`, like ``window`` and ``scale``.
        dropout_p: probability that a token is not seen; the kernel draws from torch's default generator of the device.
        cu_keys: where documents start among the keys, if these are more tokens than the queries: a document's queries
            are then its last tokens. ``None``: as among the queries.
        sinks_H: see :mod:`gptpar.model.attention_sinks`; without dropout alone.
    """
    batch, _, length, _ = q_BHSK.shape
    q_NHK, k_NGK, v_NGK = (rearrange(x, "b h s k -> (b s) h k") for x in (q_BHSK, k_BGSK, v_BGSK))
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BHSK.device)
    left = -1 if window is None else window - 1
    cu_keys = cu_seqlens if cu_keys is None else cu_keys
    # All lengths are given as S, which each batch has, so that kernels are compiled and recorded once.
    where = (q_NHK, k_NGK, v_NGK, cu_seqlens, cu_keys, length, k_BGSK.shape[2])
    if sinks_H is not None:
        y_NHK, _ = varlen_attention_with_sinks(*where[:3], sinks_H, *where[3:], left, scale)
    elif dropout_p:  # torch's function has none
        sides = {"window_size_left": left, "window_size_right": 0}
        y_NHK, *_ = torch.ops.aten._flash_attention_forward(*where, dropout_p, True, False, scale=scale, **sides)
    else:
        y_NHK = varlen_attn(*where, scale=scale, window_size=(left, 0), **_GROUPS)
    return rearrange(y_NHK, "(b s) h k -> b h s k", b=batch)
