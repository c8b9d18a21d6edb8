"""Rotary position embedding: pairs of channels of queries and keys turn with a token's position.

Legend: B batch, S sequence, H heads, K head width, R pairs of channels.
"""

from __future__ import annotations

import math

import torch

SCALED_CONTEXT, LONGEST, SHORTEST = 8192, 1, 4
"""Llama 3.1's rotary positions: the context of its first training, and how many turns of a pair of channels in this
context separate the frequencies that are divided, those in between, and those that are kept."""


def frequencies_of(
    rotated: int, base: int, scaling: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """frequencies_R of rotary positions, R = rotated / 2, in radians a token.

    Args:
        scaling: 1: they are ``base ** (-2i / rotated)``. Else as Llama 3.1 (Grattafiori et al. 2024): a frequency with
            at most one turn in 8192 tokens is divided by ``scaling``, one with at least four turns is kept, and one in
            between is a mean of both, with weights linear in its turns.
        dtype: number format of the computation, fp32 or fp64.
    """
    exponents = torch.arange(0, rotated, 2, dtype=dtype, device=device) / rotated
    plain_R: torch.Tensor = base**-exponents
    if scaling == 1:
        return plain_R
    turns_R = plain_R * (SCALED_CONTEXT / (2 * math.pi))
    kept_R = ((turns_R - LONGEST) / (SHORTEST - LONGEST)).clamp(0, 1)
    return (1 - kept_R) * plain_R / scaling + kept_R * plain_R


def rotate(
    x_BHSK: torch.Tensor, positions_BS: torch.Tensor | None, rotated: int, base: int, scaling: float = 1
) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) on the first channels of each head; returns the shape of ``x``.

    Channels i and i + rotated/2 form a pair (GPT-NeoX's and Megatron's convention), turned by the angle
    position x frequency; angles are computed in fp32, or in fp64 where ``x`` has it.

    Args:
        positions_BS: of each token; ``None``: 0, 1, 2, ...
        rotated: how many channels are turned, an even number; the others stay as they are.
        base, scaling: see :func:`frequencies_of`.
    """
    device, length = x_BHSK.device, x_BHSK.shape[2]
    exact = torch.promote_types(x_BHSK.dtype, torch.float32)
    frequencies_R = frequencies_of(rotated, base, scaling, device, exact)
    positions = torch.arange(length, device=device)[None] if positions_BS is None else positions_BS
    angles_B1SR = (positions[:, :, None].to(exact) * frequencies_R)[:, None]
    cos, sin = angles_B1SR.cos().to(x_BHSK.dtype), angles_B1SR.sin().to(x_BHSK.dtype)
    first, second, rest = x_BHSK.split([rotated // 2, rotated // 2, x_BHSK.shape[-1] - rotated], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
