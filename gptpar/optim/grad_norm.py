"""The gradient norm, computed before a gradient is divided between device and CPU: the ratio changes no bit of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

ROW = 64

Measured = dict[str, list[torch.Tensor]]
"""Unit -> norms of parts of its shard."""


class GradientNorm:
    """Sum of squares of the elements that this process counts, unit by unit.

    Args:
        counted: unit -> ranges in its whole shard that this process counts. The order of the units is that of the sum.
    """

    def __init__(self, counted: Mapping[str, Sequence[tuple[int, int]]]):
        self._counted = counted

    def measured(self, shards: Mapping[str, torch.Tensor]) -> Measured:
        """The norms of some units' final gradients, for :meth:`square`.

        Args:
            shards: unit -> its whole shard.
        """
        ranges = [(unit, start, stop) for unit in shards for start, stop in self._counted[unit]]
        norms = norms_of([shards[unit][start:stop] for unit, start, stop in ranges])
        found: Measured = {unit: [] for unit in shards}
        for (unit, *_), norm in zip(ranges, norms, strict=True):
            found[unit].append(norm)
        return found

    def measured_apart(self, on_device: Mapping[str, torch.Tensor], squares: Mapping[str, float]) -> Measured:
        """The norms of units whose gradients are divided between device and host.

        Args:
            on_device: unit -> the first elements of its shard.
            squares: of the counted elements of the others, by unit.
        """
        found: Measured = {}
        for unit, square in squares.items():
            here = on_device[unit]
            parts = [here[start:stop] for start, stop in self._counted[unit] if start < len(here)]
            there = torch.tensor([square], dtype=torch.float64, device=here.device).sqrt()
            found[unit] = [*norms_of(parts), there]
        return found

    def square(self, measured: Measured, device: torch.device) -> torch.Tensor:
        """Sum of squares (fp64 scalar) of all units' norms, in the units' order."""
        return square_of_norms([norm for unit in self._counted for norm in measured.get(unit, ())], device)

    def squares(self, measured: Measured, device: torch.device) -> torch.Tensor:
        """[units] the same for each unit (fp64), in their order."""
        found = [square_of_norms(measured.get(unit, ()), device) for unit in self._counted]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64, device=device)


def square_of(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares (fp64) of some vectors' elements; norms of 16-bit vectors are computed in fp32."""
    return square_of_norms(norms_of(pieces), device)


def norms_of(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Measure each vector: the norms (a vector in fp32 or wider) of its parts, for :func:`square_of_norms`.

    A vector's norms do not depend on the other vectors of the call.
    """
    if not pieces:
        return []
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if pieces[0].is_cuda:
        return [norm[None] for norm in torch._foreach_norm(list(pieces), 2, dtype=wide)]
    return [_norms_of_rows(piece, wide) for piece in pieces]


def _norms_of_rows(piece: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Row by row: over a long fp32 vector torch's CPU kernel drifts (6 % at 350M elements)."""
    whole = piece.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(piece[:whole].view(-1, ROW), dim=1, dtype=wide)
    return torch.cat([rows, torch.linalg.vector_norm(piece[whole:], dtype=wide)[None]])


def square_of_norms(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares (fp64) of all norms."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.cat(list(norms)), dtype=torch.float64).square()
