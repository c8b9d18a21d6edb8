"""Scaled dot-product attention with dropout of its probabilities, the same in every layout.

A GPU's attention kernel draws its mask itself, from the generator's state and the head's number within the call. On a
GPU, each query group is therefore a call of its own, under its own seed; tensor parallelism never splits a group. This
costs one launch for each group, and small micro-batches do not fill a large GPU. For CPUs torch has no such kernel: the
probabilities are formed in memory, and their mask like that of hidden states (:mod:`gptpar.model.dropout`).

Legend: B batch, S sequence, G key/value heads ("groups") of this rank, Q query heads of one group, H = G x Q, K head
width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptpar.model.dropout import PROBABILITIES, LayerSeeds, kept
from gptpar.model.varlen_attention import varlen_attention
from gptpar.topology.initial_values import seed_of

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's attention is left out: on an H200, masks of different calls were related and gradients were not finite."""

not_compiled = torch.compiler.disable if torch.backends.cuda.is_built() else lambda fn: fn
"""``disable`` imports torch's compiler, which takes a second; without CUDA nothing that it is applied to runs."""


def attention_with_dropout(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    p: float,
    seeds: LayerSeeds,
    first_group: int,
    num_groups: int,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Returns y_BHSK.

    Args:
        mask_B1SS: which tokens a token sees; ``None``: itself and all earlier ones.
        p: probability that a token is not seen.
        seeds: the layer's seeds.
        first_group: the global number of this rank's first group.
        num_groups: number of groups on all ranks.
        scale: factor of the scores; ``None``: 1 / sqrt(K).
        cu_seqlens, window: documents and window without a mask; one of them asks for flash attention's kernel
            (:mod:`gptpar.model.varlen_attention`).
    """
    if q_BHSK.is_cuda:
        how = (p, seeds.host, first_group, scale, cu_seqlens, window)
        return _one_call_a_group(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, *how)
    return _plain(q_BHSK, k_BGSK, v_BGSK, mask_B1SS, p, seeds.words, first_group, num_groups, scale)


@not_compiled  # it seeds a generator
def _one_call_a_group(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    p: float,
    seeds: torch.Tensor,
    first_group: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    seed, device = int(seeds[PROBABILITIES]), q_BHSK.device
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    num_here = k_BGSK.shape[1]
    queries = q_BHSK.shape[1] // num_here
    state, parts = generator.get_state(), []
    for group in range(num_here):
        generator.manual_seed(seed_of(seed, first_group + group))
        q_BQSK = q_BHSK[:, group * queries : (group + 1) * queries]
        k_B1SK, v_B1SK = k_BGSK[:, group : group + 1], v_BGSK[:, group : group + 1]
        if cu_seqlens is not None or window is not None:
            parts.append(varlen_attention(q_BQSK, k_B1SK, v_B1SK, cu_seqlens, window, scale, p))
            continue
        with sdpa_kernel(BACKENDS):
            y_BQSK = F.scaled_dot_product_attention(
                q_BQSK,
                k_B1SK,
                v_B1SK,
                attn_mask=mask_B1SS,
                is_causal=mask_B1SS is None,
                dropout_p=p,
                scale=scale,
                enable_gqa=queries > 1,
            )
        parts.append(y_BQSK)
    generator.set_state(state)
    return torch.cat(parts, dim=1)


def _plain(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    p: float,
    words: torch.Tensor,
    first_group: int,
    num_groups: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention that forms the probabilities in memory, in at least 32 bits."""
    (batch, _, length, width), num_here, device = q_BHSK.shape, k_BGSK.shape[1], q_BHSK.device
    wide = torch.promote_types(q_BHSK.dtype, torch.float32)
    q_BGQSK = q_BHSK.unflatten(1, (num_here, -1)).to(wide) * (width**-0.5 if scale is None else scale)
    scores_BGQSS = q_BGQSK @ k_BGSK[:, :, None].to(wide).mT
    earlier_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    seen = earlier_SS if mask_B1SS is None else mask_B1SS[:, None]
    probabilities_BGQSS = scores_BGQSS.masked_fill(~seen, float("-inf")).softmax(-1)
    queries = q_BGQSK.shape[2]
    heads_BGQ = torch.arange(batch * num_groups * queries, dtype=torch.int32, device=device)
    heads_BGQ = heads_BGQ.view(batch, num_groups, queries)[:, first_group : first_group + num_here]
    rows_BGQS = heads_BGQ[..., None] * length + torch.arange(length, dtype=torch.int32, device=device)
    kept_BGQSS = kept(words[PROBABILITIES], rows_BGQS, length, p)
    dropped_BGQSS = torch.where(kept_BGQSS, probabilities_BGQSS * (1 / (1 - p)), 0.0)
    return (dropped_BGQSS @ v_BGSK[:, :, None].to(wide)).flatten(1, 2).to(q_BHSK.dtype)
