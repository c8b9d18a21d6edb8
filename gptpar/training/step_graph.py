"""Forward and backward of a step as one CUDA graph.

A step of many small pieces of work (pipeline and tensor parallelism cut it into hundreds) is limited by the host that
launches its kernels one by one. Recorded once, the same kernels and transfers are launched as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from gptpar.data.loader import MicroBatch

EAGER_STEPS = 2
"""Steps that run launch by launch first: kernels are compiled and chosen, connections made, buffers found."""

Work = Callable[[Sequence[MicroBatch]], torch.Tensor]


class StepGraph:
    """Calls ``work`` on micro-batches: the first times as it is, then as a recording of it.

    What ``work`` does on the host happens while it is recorded, and not again. A step whose micro-batches differ in
    number or shape from the recorded ones runs launch by launch.

    Args:
        work: forward and backward on micro-batches that are on the device; draws no random numbers, waits for nothing
            on the host, and leaves everything it began finished. Returns a tensor.
        before: called before each recording and each replay; must leave nothing pending that ``work`` would wait for.
    """

    def __init__(self, work: Work, before: Callable[[], None]):
        self._work, self._before = work, before
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[MicroBatch] = []
        self._output = torch.empty(0)

    def __call__(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Do the work; the result is overwritten by the next call."""
        self._calls += 1
        if self._calls <= EAGER_STEPS or (self._graph is not None and _shapes(batches) != _shapes(self._inputs)):
            return self._work(batches)
        self._before()
        if self._graph is None:
            self._record(batches)
        assert self._graph is not None
        for mine, given in zip(_tensors(self._inputs), _tensors(batches), strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output

    def release(self) -> None:
        """Forget the recording: NCCL's connections cannot be closed while one refers to them."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph, self._calls = None, 0

    def _record(self, batches: Sequence[MicroBatch]) -> None:
        self._inputs = [batch.clone() for batch in batches]
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's threads and NCCL's go on with their own calls meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = self._work(self._inputs)


def _tensors(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    found = [getattr(batch, field.name) for batch in batches for field in fields(batch)]
    return [tensor for tensor in found if tensor is not None]


def _shapes(batches: Sequence[MicroBatch]) -> list[tuple[torch.Size | None, ...]]:
    return [
        tuple(None if (tensor := getattr(batch, field.name)) is None else tensor.shape for field in fields(batch))
        for batch in batches
    ]
