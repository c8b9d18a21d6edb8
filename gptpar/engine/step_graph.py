"""Forward and backward of a step as CUDA graphs.

A step of many small pieces of work (pipeline and tensor parallelism cut it into hundreds) is limited by the host that
launches its kernels one by one. Recorded once, the same kernels and transfers are launched as one. Where the host has
to act in between, for instance wait until the CPU optimizer has updated a layer's parameters, the recording is cut:
each part is launched as one, and the host acts between them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

EAGER_STEPS = 2
"""Steps that run launch by launch first: kernels are compiled and chosen, connections made, buffers found."""

Batch = Any
"""A dataclass of tensors, some of them ``None``, with a ``clone()``."""

Work = Callable[[Sequence[Batch]], torch.Tensor]
Action = Callable[[], object]


class Cuts:
    """Lets the host act amid a step's launches; while a step is recorded, the recording is cut there.

    Attributes:
        recorder: takes the actions of a step that is being recorded.
    """

    def __init__(self) -> None:
        self.recorder: Callable[[Action], None] | None = None

    def at(self, action: Action) -> None:
        """Act here, now or in each replay."""
        if self.recorder is None:
            action()
        else:
            self.recorder(action)


class StepGraph:
    """Calls ``work`` on micro-batches: the first times as it is, then as a recording of it.

    What ``work`` does on the host happens while it is recorded, and not again, except for what it does at ``cuts``. A
    step whose micro-batches differ in number or shape from the recorded ones runs launch by launch.

    Args:
        work: forward and backward on micro-batches that are on the device; draws no random numbers, waits for nothing
            on the host, and leaves everything it began finished. Returns a tensor.
        before: called before each recording and each replay; must leave nothing pending that ``work`` would wait for.
        let_go: called before each launched step and each recording: nobody holds memory of the last step's gradients
            afterwards, so that the step may take it anew.
        cuts: where the host acts in between, with tensors that nothing else in the step writes to.
    """

    def __init__(self, work: Work, before: Callable[[], None], let_go: Callable[[], None], cuts: Cuts):
        self._work, self._before, self._let_go, self._cuts = work, before, let_go, cuts
        self._calls = 0
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._parts: list[Action] = []
        self._inputs: list[Batch] = []
        self._output = torch.empty(0)
        self._stream = torch.cuda.Stream()

    def __call__(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Do the work; the result is overwritten by the next call."""
        self._calls += 1
        if self._calls <= EAGER_STEPS or (self._parts and _shapes(batches) != _shapes(self._inputs)):
            self._let_go()
            return self._work(batches)
        self._before()
        if not self._parts:
            self._record(batches)
        for mine, given in zip(_tensors(self._inputs), _tensors(batches), strict=True):
            mine.copy_(given, non_blocking=True)
        for part in self._parts:
            part()
        return self._output

    def release(self) -> None:
        """Forget the recording: NCCL's connections cannot be closed while one refers to them."""
        if self._graphs:
            torch.cuda.synchronize()
            for graph in self._graphs:
                graph.reset()
            self._graphs, self._parts, self._calls = [], [], 0

    def _record(self, batches: Sequence[Batch]) -> None:
        self._inputs = [batch.clone() for batch in batches]
        self._let_go()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        # The backward pass on this thread, too: a part has to end on the thread on which it began.
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            self._begin_part()
            self._cuts.recorder = self._act_between
            try:
                self._output = self._work(self._inputs)
            finally:
                self._cuts.recorder = None
                self._end_part()

    def _act_between(self, action: Action) -> None:
        self._end_part()
        self._parts.append(action)
        self._begin_part()

    def _begin_part(self) -> None:
        pool = self._graphs[0].pool() if self._graphs else None
        self._graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.stream(self._stream):
            # thread_local: the loader's threads and NCCL's go on with their own calls meanwhile
            self._graphs[-1].capture_begin(pool, capture_error_mode="thread_local")

    def _end_part(self) -> None:
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # two actions in a row
            self._graphs[-1].capture_end()
        self._parts.append(self._graphs[-1].replay)


def _tensors(batches: Sequence[Batch]) -> list[torch.Tensor]:
    found = [getattr(batch, field.name) for batch in batches for field in fields(batch)]
    return [tensor for tensor in found if tensor is not None]


def _shapes(batches: Sequence[Batch]) -> list[tuple[torch.Size | None, ...]]:
    return [
        tuple(None if (tensor := getattr(batch, field.name)) is None else tensor.shape for field in fields(batch))
        for batch in batches
    ]
