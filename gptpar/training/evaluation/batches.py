"""Rows of tokens side by side: which rows a micro-batch holds, and how they are padded.

Rows are sorted by length, so that little is padded. Padding is on the right, where no token of the row sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptpar.training.evaluation.rows import TokenRow

WIDTH_STEP = 16
"""Widths are multiples of this: few shapes, of which kernels are chosen and compiled, and little padding."""


@dataclass(frozen=True)
class RowBatch:
    """A micro-batch of one process.

    Attributes:
        rows: their numbers in the task.
        height: rows that are computed; those beyond ``rows`` are padding, where other processes have more rows.
        width: tokens of a row, with padding.
    """

    rows: tuple[int, ...]
    height: int
    width: int


def plan_batches(
    lengths: Sequence[int], *, tokens: int, context: int, multiple: int = 1, ranks: int = 1, rank: int = 0
) -> list[RowBatch]:
    """The micro-batches of one data-parallel rank. All ranks have equally many, of the same shapes.

    Args:
        lengths: of the rows.
        tokens: the most tokens of a micro-batch, with padding; a longer row is alone.
        context: the greatest width.
        multiple: of which a width is a multiple (unless it is the context), for tokens shared by tensor ranks.
        ranks, rank: the data axis.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    step = math.lcm(WIDTH_STEP, multiple)
    batches = []
    while order:
        width = min(-(-max(1, lengths[order[0]]) // step) * step, context)
        height = min(max(1, tokens // width), -(-len(order) // ranks))
        here, order = order[: height * ranks], order[height * ranks :]
        batches.append(RowBatch(tuple(here[rank::ranks]), height, width))
    return batches


def batch_tensors(batch: RowBatch, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, labels, scored) of a micro-batch: int64 and bool, each [height, width].

    Args:
        rows: all rows of the task.
    """
    tokens, labels = torch.zeros(2, batch.height, batch.width, dtype=torch.int64)
    scored = torch.zeros(batch.height, batch.width, dtype=torch.bool)
    for place, number in enumerate(batch.rows):
        row, length = rows[number], len(rows[number])
        ids = torch.tensor(row.tokens)
        tokens[place, :length], labels[place, :length] = ids[:-1], ids[1:]
        scored[place, length - row.num_scored : length] = True
    return tokens, labels, scored
