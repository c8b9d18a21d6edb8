"""Declares how a parameter divides into logical matrices, which an optimizer over matrices treats one by one.

The last two dims of a parameter are one matrix [rows, columns], and the dims in front of them count matrices: experts,
or gate and up projection. Some layers keep several matrices in one parameter, row by row: they declare it with
:class:`Interleaved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Matrices:
    """How a parameter divides into matrices, unless it is :class:`Interleaved` or :class:`Stacked`: see the module."""

    def shapes(self, full: torch.Size) -> tuple[tuple[int, int, int], ...]:
        """(number of matrices, rows, columns) of each batch of equal matrices.

        Args:
            full: shape of the whole parameter.
        """
        return ((full[:-2].numel(), *full[-2:]),)

    def split(self, full: Tensor) -> list[Tensor]:
        """The batches [matrices, rows, columns] of a whole parameter, as views where that is possible."""
        return [part.reshape(shape) for part, shape in zip(self.views(full), self.shapes(full.shape), strict=True)]

    def join(self, batches: Sequence[Tensor], full: torch.Size) -> Tensor:
        """The whole parameter of these batches: what :meth:`split` took apart."""
        found = batches[0].new_empty(full)
        for view, batch in zip(self.views(found), batches, strict=True):
            view.copy_(batch.view(view.shape))
        return found

    def views(self, part: Tensor) -> list[Tensor]:
        """The elements of each batch, in its order: views of a whole parameter, or of a part that divides no block."""
        return [part]

    def divides(self, dim: int, num_dims: int) -> bool:
        """Whether a matrix is divided where a dim of the parameter is split."""
        return dim >= num_dims - 2


@dataclass(frozen=True)
class Interleaved(Matrices):
    """Dim 0 of a parameter [rows, columns] repeats blocks of rows; all blocks of one kind together are one matrix.

    So query groups follow each other in a QKV weight: rows of queries, of a key and of a value, again and again.

    Attributes:
        lengths: rows of a block of each kind, in their order.
        head: rows of a head, which divide all lengths.
    """

    lengths: tuple[int, ...]
    head: int

    def shapes(self, full: torch.Size) -> tuple[tuple[int, int, int], ...]:
        blocks = full[0] // sum(self.lengths)
        return tuple((1, blocks * length, full[1]) for length in self.lengths)

    def views(self, part: Tensor) -> list[Tensor]:
        return list(part.view(-1, sum(self.lengths), part.shape[1]).split(self.lengths, dim=1))

    @property
    def heads(self) -> Stacked:
        """This parameter with one matrix a head."""
        return Stacked(self.head)


@dataclass(frozen=True)
class Stacked(Matrices):
    """Matrices stacked along dim 0 of a parameter [all rows, columns], each with this number of ``rows``."""

    rows: int

    def shapes(self, full: torch.Size) -> tuple[tuple[int, int, int], ...]:
        return ((full[0] // self.rows, self.rows, full[1]),)

    def views(self, part: Tensor) -> list[Tensor]:
        return [part.view(-1, self.rows, part.shape[1])]

    def divides(self, dim: int, num_dims: int) -> bool:
        return dim == 1


WHOLE = Matrices()
