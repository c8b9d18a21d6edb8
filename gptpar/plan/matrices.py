"""The time of an optimizer over matrices (:mod:`gptpar.optim.matrix_update`): products and messages. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

from gptpar.engine.units import Unit
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.plan.job import Job, StagePart

Product = Callable[[int, int, int], float]
"""(rows, inner, columns) -> seconds of a matrix product."""


def matrices_of(job: Job, unit: Unit) -> Counter[tuple[MatrixUpdate, int, int]]:
    """(update, rows, columns) -> number of such matrices in a unit."""
    found: Counter[tuple[MatrixUpdate, int, int]] = Counter()
    for param in unit.params.values():
        update, info = job.layers.groups.updates[param.group], param.info
        if isinstance(update, MatrixUpdate):
            for count, rows, columns in update.matrices(info.matrices).shapes(info.full_shape):
                found[update, rows, columns] += count
    return found


def flops_of_step(job: Job) -> float:
    """Floating-point operations of a step's orthogonalizations, of each matrix once."""
    return sum(
        count * update.flops(rows, columns)
        for number in range(len(job.layers.kinds))
        for (update, rows, columns), count in matrices_of(job, job.unit(number)).items()
    )


def seconds(job: Job, part: StagePart, product: Product, bandwidth: float) -> float:
    """Seconds of a stage's orthogonalizations: one unit after the other, each matrix on one of those that share it.

    Args:
        bandwidth: bytes/s of each process while matrices are assembled and their updates return.
    """
    sharers, found = job.shards * job.mesh.tensor, dict[int, float]()
    for kind in {job.layers.kinds[number] for number in part.layers}:
        matrices = matrices_of(job, job.unit(kind))
        costs = [_seconds_of(update, rows, columns, product) for update, rows, columns in matrices.elements()]
        elements = sum(count * rows * columns for (_, rows, columns), count in matrices.items())
        sent = 2 * elements * job.element_size * (sharers - 1) / sharers**2
        found[kind] = longest_first(costs, sharers) + sent / bandwidth
    return sum(found[job.layers.kinds[number]] for number in part.layers)


def _seconds_of(update: MatrixUpdate, rows: int, columns: int, product: Product) -> float:
    short, long = sorted((rows, columns))
    once = product(short, long, short) + product(short, short, short) + product(short, short, long)
    return once * update.flops(rows, columns) / (4.0 * short * short * long + 2.0 * short**3)


def longest_first(costs: Iterable[float], processes: int) -> float:
    """The time at which the last process is done, if each takes the longest remaining work once it is free."""
    ends = [0.0] * processes
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)
