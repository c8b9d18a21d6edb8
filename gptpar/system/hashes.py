"""Numbers that look random and depend on their arguments alone: seeds by name, and a permutation of 32 bits.

The permutation is ``lowbias32`` (Ellis 2018): each bit of the result depends on each bit of the input.
"""

from __future__ import annotations

import hashlib

import torch

# Products of int32 wrap around on every device; not every operator of torch takes unsigned integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32


def seed_of(seed: int, *words: object) -> int:
    """A 63-bit seed that depends on the seed and the words alone."""
    text = "\0".join([str(seed), *map(str, words)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Permute each int32 element, in place; returns the argument."""
    x = fold(x, 16).mul_(FIRST)
    x = fold(x, 15).mul_(SECOND)
    return fold(x, 16)


def mixed_number(x: int) -> int:
    """Permute one unsigned number of 32 bits as :func:`mixed` does."""
    x = (x ^ x >> 16) * FIRST % 2**32
    x = (x ^ x >> 15) * SECOND % 2**32
    return x ^ x >> 16


def fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``x ^= x >> bits`` in int32, shifting zeros in."""
    return x.bitwise_xor_((x >> bits).bitwise_and_(2 ** (32 - bits) - 1))
