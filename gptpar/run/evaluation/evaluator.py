"""Scores of tasks from a model in any layout: padded rows, the forward pass of training, a sum over the processes.

Rows are sorted by length, so that there is little padding. Padding is on the right, where no token of the row sees it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gptpar.pipeline.runtime import Pipeline
from gptpar.reporting.records import TaskScores
from gptpar.run.evaluation.tasks import Task, TokenRow
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA

MICRO_BATCHES_A_STAGE = 4
"""Micro-batches in the pipeline at once, for each stage: few enough to stop soon, enough to keep stages busy."""


@dataclass(frozen=True)
class Evaluator:
    """Runs tasks through a model.

    Attributes:
        pipeline: the model as this process holds it.
        context: the most tokens that the model reads.
        tokens: of a micro-batch.
        note: called with a phrase for what this process begins to do.
    """

    pipeline: Pipeline
    topology: Topology
    context: int
    tokens: int
    note: Callable[[str], None] = lambda sentence: None

    def evaluate(self, task: Task, stop: Callable[[], bool] = lambda: False) -> TaskScores | None:
        """A task's scores, on every process; ``None`` if the evaluation was broken off.

        Args:
            stop: whether to break it off; all processes call it together and get the same answer.
        """
        started = time.perf_counter()
        sums = self.log_likelihoods(task, stop)
        if sums is None:
            return None
        scores = task.scores(sums.tolist())
        return TaskScores(task.name, scores, len(task.items), task.num_tokens, time.perf_counter() - started)

    @torch.no_grad()
    def log_likelihoods(self, task: Task, stop: Callable[[], bool]) -> torch.Tensor | None:
        """float64[rows]: the log-likelihood of each row's scored tokens; ``None`` if the evaluation was broken off."""
        mesh = self.topology.mesh
        batches = plan_batches(
            [len(row) for row in task.rows],
            tokens=self.tokens,
            context=self.context,
            multiple=mesh.tensor,
            ranks=mesh.data,
            rank=self.topology.position(DATA),
        )
        sums = torch.zeros(len(task.rows), dtype=torch.float64, device=self.topology.device)
        self.pipeline.eval()
        at_once = 1 if mesh.pipeline == 1 else MICRO_BATCHES_A_STAGE * mesh.pipeline
        for start in range(0, len(batches), at_once):
            if stop():
                return None
            self.note(f"evaluation of {task.name}, micro-batch {start + 1} of {len(batches)}")
            self._add(sums, task, batches[start : start + at_once])
        return self.topology.sum_over_all(sums / mesh.tensor)  # all tensor ranks have the losses

    def _add(self, sums: torch.Tensor, task: Task, batches: Sequence[RowBatch]) -> None:
        """Run some micro-batches, and write the log-likelihoods of their rows into ``sums``."""
        device = self.topology.device
        tensors = [[one.to(device, non_blocking=True) for one in batch_tensors(b, task.rows)] for b in batches]
        inputs = [
            (tokens_BS, {"labels": labels_BS, "seq_length": tokens_BS.shape[1], "each_token": True})
            for tokens_BS, labels_BS, _ in tensors
        ]
        # Only the last stage has losses.
        for losses_N, batch, (_, _, scored_BS) in zip(self.pipeline.outputs(inputs), batches, tensors, strict=False):
            losses_BS = losses_N.double().view_as(scored_BS).masked_fill(~scored_BS, 0.0)
            rows = torch.tensor(batch.rows, dtype=torch.int64).to(device, non_blocking=True)
            sums[rows] = -losses_BS.sum(1)[: len(rows)]


WIDTH_STEP = 16
"""Widths are multiples of this: kernels are compiled for few shapes, and there is little padding."""


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
