"""Plans micro-batches of token rows for an evaluation, and pads them.

Rows are sorted by length, so that there is little padding. Padding is on the right, where no token of the row sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptpar.run.evaluation.rows import TokenRow

WIDTH_STEP = 16
"""Widths are multiples of this: few shapes for which kernels are compiled, and little padding."""


@dataclass(frozen=True)
class RowBatch:
    """A micro-batch of one process.

    Attributes:
        rows: the numbers of its rows in the task.
        height: rows that are computed; rows beyond ``rows`` are padding, because other processes have more rows.
        width: tokens of a row, with padding.
    """

    rows: tuple[int, ...]
    height: int
    width: int


def plan_batches(
    lengths: Sequence[int], *, tokens: int, context: int, multiple: int = 1, ranks: int = 1, rank: int = 0
) -> list[RowBatch]:
    """The micro-batches of one data-parallel rank. All ranks have as many micro-batches, of the same shapes.

    Args:
        lengths: of the rows.
        tokens: the most tokens of a micro-batch, with padding; a longer row is alone.
        context: the greatest width.
        multiple: divides every width but the context, so that tensor ranks can share the tokens.
        ranks, rank: size of the data axis, and the position on it.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    step = math.lcm(WIDTH_STEP, multiple)
    batches, begin = [], 0
    while begin < len(order):
        width = min(-(-max(1, lengths[order[begin]]) // step) * step, context)
        height = min(max(1, tokens // width), -(-(len(order) - begin) // ranks))
        end = begin + height * ranks
        batches.append(RowBatch(tuple(order[begin + rank : end : ranks]), height, width))
        begin = end
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
