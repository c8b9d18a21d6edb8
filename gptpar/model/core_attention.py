"""Scaled dot-product attention (the kernel call), with documents, windows and dropout of its probabilities.

Another kernel, or attention that splits the sequence over processes, would replace :func:`core_attention`.

Dropout is the same in every layout. A GPU's attention kernel draws its mask itself, from the generator's state and the
head's number within the call. On a GPU, each query group is therefore a call of its own, under its own seed; tensor
parallelism never splits a group. This costs one launch for each group, and small micro-batches do not fill a large GPU.
For CPUs torch has no such kernel: the probabilities are formed in memory, and their mask like that of hidden states
(:mod:`gptpar.model.dropout`).

Legend: B batch, S sequence, G key/value heads ("groups") of this rank, Q query heads of one group, H = G x Q, K head
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptpar.model.attention_sinks import attention_to_seen
from gptpar.model.dropout import PROBABILITIES, LayerSeeds, kept
from gptpar.model.varlen_attention import has_varlen_kernel, varlen_attention
from gptpar.system.hashes import seed_of

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's attention is left out: on an H200, masks of different calls were related and gradients were not finite."""

not_compiled = torch.compiler.disable if torch.backends.cuda.is_built() else lambda fn: fn
"""``disable`` imports torch's compiler, which takes a second; without CUDA nothing that it is applied to runs."""


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities.

    Attributes:
        p: the dropout probability.
        seeds: the layer's seeds.
        first_group: the global number of this rank's first group.
        num_groups: number of groups on all ranks.
    """

    p: float
    seeds: LayerSeeds
    first_group: int
    num_groups: int


class AttentionRule(NamedTuple):
    """Which tokens a token sees, and how scores become probabilities: what attention is given beside q, k and v.

    Attributes:
        cu_seqlens: where documents start among all samples' tokens, see :class:`gptpar.data.loader.MicroBatch`; tokens
            see their own document only. ``None``: a sample is one document.
        dropout: dropout of the attention probabilities; ``None``: there is none.
        window: how many tokens a token sees, itself among them; ``None``: all earlier ones.
        scale: factor of the scores; ``None``: 1 / sqrt(K).
        sinks_H: a logit of each head, which takes part in its softmax (:mod:`gptpar.model.attention_sinks`). Sinks
            cannot be combined with dropout.
    """

    cu_seqlens: torch.Tensor | None = None
    dropout: AttentionDropout | None = None
    window: int | None = None
    scale: float | None = None
    sinks_H: torch.Tensor | None = None


CAUSAL = AttentionRule()


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
) -> torch.Tensor:
    """Boolean mask [B or 1, 1, S, S]."""
    if cu_seqlens is not None:
        return document_mask(cu_seqlens, batch, length, window)
    return seen_SS(length, window, device)[None, None]


def one_call_a_document(
    q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, cu_seqlens: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Causal attention inside documents on a CPU, where reading their lengths waits for nothing; returns y_BHSK.

    Args:
        rule: inside a document.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = (rearrange(x, "b h s k -> 1 h (b s) k").split(lengths, 2) for x in (q_BHSK, k_BGSK, v_BGSK))
    found = [core_attention(q, k, v, rule) for q, k, v in zip(*parts, strict=True)]
    y_NHK = torch.cat([rearrange(y, "1 h s k -> s h k") for y in found])
    return rearrange(y_NHK, "(b s) h k -> b h s k", b=len(q_BHSK))


def core_attention(
    q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, rule: AttentionRule = CAUSAL
) -> torch.Tensor:
    """Causal attention, each group of query heads with its own key and value head; returns y_BHSK.

    Where flash attention has a variable-length kernel (:func:`has_varlen_kernel`), hidden pairs of tokens cost nothing.
    On a CPU, pairs of different documents cost nothing unless there is dropout. Else documents and windows become a
    mask in memory, which saves no computation.
    """
    cu_seqlens, dropout, window, scale, sinks_H = rule
    assert dropout is None or sinks_H is None, "attention sinks cannot be combined with dropout"
    (batch, _, length, width), device = q_BHSK.shape, q_BHSK.device
    if window is not None and window >= length:
        window, rule = None, rule._replace(window=None)
    is_plain = all(one is None for one in (cu_seqlens, window, sinks_H))
    if not is_plain and has_varlen_kernel(device.type, q_BHSK.dtype, width):
        if dropout is None:
            return varlen_attention(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, window, scale, sinks_H=sinks_H)
        return attention_with_dropout(q_BHSK, k_BGSK, v_BGSK, None, rule)
    if cu_seqlens is not None and dropout is None and device.type == "cpu":
        return one_call_a_document(q_BHSK, k_BGSK, v_BGSK, cu_seqlens, rule._replace(cu_seqlens=None))
    mask_B1SS = None if is_plain else attention_mask(batch, length, cu_seqlens, window, device)
    if dropout is not None:
        return attention_with_dropout(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, rule)
    return attention_to_seen(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, scale, sinks_H)


def attention_with_dropout(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Returns y_BHSK.

    Args:
        mask_B1SS: which tokens a token sees, by its document and window, too. ``None``: itself and all earlier ones; a
            document or a window then asks for flash attention's kernel (:mod:`gptpar.model.varlen_attention`).
        rule: with dropout.
    """
    attend = _dropout_in_kernel if q_BHSK.is_cuda else _dropout_in_memory
    return attend(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, rule)


@not_compiled  # it seeds a generator
def _dropout_in_kernel(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    cu_seqlens, dropout, window, scale, _ = rule
    assert dropout is not None
    seed, device = int(dropout.seeds.host[PROBABILITIES]), q_BHSK.device
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    num_here = k_BGSK.shape[1]
    queries = q_BHSK.shape[1] // num_here
    state, parts = generator.get_state(), []
    for group in range(num_here):
        generator.manual_seed(seed_of(seed, dropout.first_group + group))
        q_BQSK = q_BHSK[:, group * queries : (group + 1) * queries]
        k_B1SK, v_B1SK = k_BGSK[:, group : group + 1], v_BGSK[:, group : group + 1]
        if mask_B1SS is None and (cu_seqlens is not None or window is not None):
            parts.append(varlen_attention(q_BQSK, k_B1SK, v_B1SK, cu_seqlens, window, scale, dropout.p))
            continue
        with sdpa_kernel(BACKENDS):
            y_BQSK = F.scaled_dot_product_attention(
                q_BQSK,
                k_B1SK,
                v_B1SK,
                attn_mask=mask_B1SS,
                is_causal=mask_B1SS is None,
                dropout_p=dropout.p,
                scale=scale,
                enable_gqa=queries > 1,
            )
        parts.append(y_BQSK)
    generator.set_state(state)
    return torch.cat(parts, dim=1)


def _dropout_in_memory(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention that forms the probabilities in memory, in at least 32 bits."""
    assert rule.dropout is not None
    p, seeds, first_group, num_groups = rule.dropout
    (batch, _, length, width), num_here, device = q_BHSK.shape, k_BGSK.shape[1], q_BHSK.device
    wide = torch.promote_types(q_BHSK.dtype, torch.float32)
    q_BGQSK = q_BHSK.unflatten(1, (num_here, -1)).to(wide) * (width**-0.5 if rule.scale is None else rule.scale)
    scores_BGQSS = q_BGQSK @ k_BGSK[:, :, None].to(wide).mT
    earlier_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    seen = earlier_SS if mask_B1SS is None else mask_B1SS[:, None]
    probabilities_BGQSS = scores_BGQSS.masked_fill(~seen, float("-inf")).softmax(-1)
    queries = q_BGQSK.shape[2]
    heads_BGQ = torch.arange(batch * num_groups * queries, dtype=torch.int32, device=device)
    heads_BGQ = heads_BGQ.view(batch, num_groups, queries)[:, first_group : first_group + num_here]
    rows_BGQS = heads_BGQ[..., None] * length + torch.arange(length, dtype=torch.int32, device=device)
    kept_BGQSS = kept(seeds.words[PROBABILITIES], rows_BGQS, length, p)
    dropped_BGQSS = torch.where(kept_BGQSS, probabilities_BGQSS * (1 / (1 - p)), 0.0)
    return (dropped_BGQSS @ v_BGSK[:, :, None].to(wide)).flatten(1, 2).to(q_BHSK.dtype)
