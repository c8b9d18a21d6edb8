"""The number formats by the names that flags give them, and numbers as sums of narrower ones."""

from __future__ import annotations

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

_CUT = {torch.bfloat16: 16, torch.float16: 13}
"""Format -> lower bits of an fp32 number that it does not have."""


def in_parts(x: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    """``count`` tensors of a number format, the largest first, whose sum is x, as far as they have bits for it.

    x has the first part's gradient. In 16 bits, the bits of x in fp32 are rounded. A compiler would drop the rounding
    of a number that is rounded to 16 bits and then subtracted in fp32, and with it all parts but the first.
    """
    if dtype not in _CUT:
        first = x.to(dtype)
        return first, *[torch.zeros_like(first)] * (count - 1)
    bits, rest, parts = _CUT[dtype], x.detach().to(torch.float32), []
    for _ in range(count):
        nearest = ((rest.view(torch.int32) + (1 << bits - 1)) & -(1 << bits)).view(torch.float32)
        parts.append(nearest.to(dtype))
        rest = rest - nearest
    if x.requires_grad:  # the bits have no gradient
        parts[0] = parts[0] + (x - x.detach()).to(dtype)
    return tuple(parts)
