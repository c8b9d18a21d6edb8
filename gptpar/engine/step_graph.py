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
from functools import partial
from typing import Any

import torch

from gptpar.engine.subscriber import Subscriber

EAGER_STEPS = 2
"""Steps that run launch by launch first: kernels are compiled and chosen, connections made, buffers found."""

Batch = Any
"""A dataclass of tensors, some of them ``None``, with a ``clone()``."""

Work = Callable[[Sequence[Batch]], torch.Tensor]
Action = Callable[[], object]


class HostCalls:
    """Passes on what the host is asked amid a step's launches; while the step is recorded, to the recording."""

    def __init__(self, host: Subscriber):
        self._host = host
        self.recorder: Callable[[Action], None] | None = None

    def wait(self, unit: str) -> None:
        """Return when a unit's parameters are updated, or will be before what follows on the device."""
        self._do(partial(self._host.wait, unit))

    def submit_gradient(self, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        """A unit's gradient is complete; ``formed``: so many elements are, but for what the host has been told of."""
        self._do(partial(self._host.submit_gradient, unit, grad, formed=formed))

    def finish(self) -> None:
        """Return when everything is updated, and no gradient of an earlier step is needed any more."""
        self._host.finish()

    def _do(self, action: Action) -> None:
        (self.recorder or _at_once)(action)


def _at_once(action: Action) -> None:
    action()


class StepGraph:
    """Calls ``work`` on micro-batches: the first times as it is, then as a recording of it.

    What ``work`` does on the host happens while it is recorded, and not again, except for what it asks of ``calls``. A
    step whose micro-batches differ in number or shape from the recorded ones runs launch by launch.

    Args:
        work: forward and backward on micro-batches that are on the device; draws no random numbers, waits for nothing
            on the host, and leaves everything it began finished. Returns a tensor.
        before: called before each recording and each replay; must leave nothing pending that ``work`` would wait for.
        calls: what the host is asked in between, with tensors that nothing else in the step writes to.
    """

    def __init__(self, work: Work, before: Callable[[], None], calls: HostCalls | None = None):
        self._work, self._before, self._host_calls = work, before, calls
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
            if self._host_calls is not None:
                self._host_calls.recorder = self._act_between
            try:
                self._output = self._work(self._inputs)
            finally:
                if self._host_calls is not None:
                    self._host_calls.recorder = None
                self._end_part()

    def _let_go(self) -> None:
        """Of the last step's gradients: launched, a step takes new memory for its own, and so does the recording."""
        if self._host_calls is not None:
            self._host_calls.finish()

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
