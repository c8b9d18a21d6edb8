"""Records the forward and backward passes of a step as CUDA graphs, and replays them.

Pipeline and tensor parallelism divide a step into hundreds of short kernels, and the host that launches them one by one
becomes the limit. A CUDA graph records the kernels and transfers once and launches them together. Where the host has to
act in between, for instance to wait until the CPU optimizer has updated a layer's parameters, the recording is split
into parts: each part is one launch, and the host acts between them.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import torch

from gptpar.engine.tensors import Outline, mapped, outline, tensors_in

LAUNCHED_STEPS = 2
"""Equal steps that run without a graph first: they compile kernels, open connections and allocate buffers."""

Given = TypeVar("Given")
Result = TypeVar("Result")
Action = Callable[[], object]


class GraphBreaks:
    """Lets the host act between a step's launches; while a step is recorded, the recording is split there.

    Attributes:
        at: acts now; while a step is recorded, acts at this point of each replay instead.
    """

    def __init__(self) -> None:
        self.at: Callable[[Action], object] = operator.call

    @property
    def in_recording(self) -> bool:
        """Whether a step is being recorded."""
        return self.at is not operator.call


class Recorder(Protocol):
    """Records launches, part by part, for replays."""

    def recording(self) -> AbstractContextManager[None]:
        """A context around all parts of a recording."""

    def begin_part(self) -> None:
        """Record launches from now on instead of executing them."""

    def end_part(self) -> Action:
        """Returns a call that replays the part."""

    def release(self) -> None:
        """Forget all parts."""


class StepGraph(Generic[Given, Result]):
    """Calls ``work`` with a step's micro-batches: the first times as it is, then as a recording of it.

    A replay repeats no work on the host, except for the actions at ``graph_breaks``. So a step is recorded only after
    equal steps, which differ in the numbers in tensors alone. A step that differs in more runs without a graph.

    The state of an object. Between two calls the last three are all filled, or, without a recording, all empty:

    ============  ==================================================================================================
    ``_last``     outlines of the micro-batches and of the result of the step that was launched last
    ``_alike``    number of equal steps launched in a row, up to that step
    ``_is_off``   whether a recording has failed: all later steps are launched
    ``_parts``    the recording: graphs and actions, in turn
    ``_inputs``   outline of the recorded step's micro-batches, and their memory, to which replays copy
    ``_output``   the recorded step's result
    ============  ==================================================================================================

    Args:
        work: forward and backward on micro-batches that are on the device; waits for nothing on the host, and leaves
            everything it began finished. Its result is of the same kinds as micro-batches
            (:mod:`gptpar.engine.tensors`). Torch's default generator goes on in replays, others do not.
        before: called before each recording and each replay; must leave nothing pending that ``work`` would wait for.
        let_go: called before each launched step and each recording: it ends the last step, and frees the memory of
            that step's gradients for this step.
        graph_breaks: where the host acts in between, with tensors that nothing else in the step writes to.
        launched_steps: number of equal steps before a recording.
        quiet: called before each recording; returns when no other thread waits for the device. During a recording,
            torch refuses such waits to all threads of the process.
        given_up: called with the error of a recording; later steps run without a graph. ``None``: raise it.
        recorder: default: of CUDA graphs.
    """

    def __init__(
        self,
        work: Callable[[Given], Result],
        before: Callable[[], None],
        let_go: Callable[[], None],
        graph_breaks: GraphBreaks,
        *,
        launched_steps: int = LAUNCHED_STEPS,
        quiet: Callable[[], None] = lambda: None,
        given_up: Callable[[Exception], None] | None = None,
        recorder: Recorder | None = None,
    ):
        self._work, self._before, self._let_go, self._graph_breaks = work, before, let_go, graph_breaks
        self._launched_steps, self._quiet, self._given_up = launched_steps, quiet, given_up
        self._recorder = recorder or CudaRecorder()
        self._alike, self._last, self._is_off = 0, (object(), object()), False
        self._parts: list[Action] = []
        self._inputs: tuple[Outline, Given] | None = None
        self._output: list[Result] = []

    def __call__(self, given: Given) -> Result:
        """Do the work; the result's tensors are overwritten by the next call."""
        kind = outline(given)
        if not self._parts and not self._is_off and self._alike >= self._launched_steps and kind == self._last[0]:
            self._record(kind, given)
        if self._inputs is None or kind != self._inputs[0]:
            return self._launch(kind, given)
        return self._replay(given)

    def launch(self, given: Given) -> Result:
        """Do a step again without the recording, whose memory holds the activations of a whole step: it is released."""
        self.release()
        return self._launch(outline(given), given)

    def _launch(self, kind: Outline, given: Given) -> Result:
        self._let_go()
        result = self._work(given)
        last, self._last = self._last, (kind, outline(result))
        self._alike = self._alike + 1 if self._last == last else 1
        return result

    @torch.no_grad()
    def _replay(self, given: Given) -> Result:
        assert self._inputs is not None
        self._before()
        for mine, theirs in zip(tensors_in(self._inputs[1]), tensors_in(given), strict=True):
            mine.copy_(theirs, non_blocking=True)
        for part in self._parts:
            part()
        return self._output[0]

    def release(self) -> None:
        """Forget the recording: NCCL's connections cannot be closed while one refers to them."""
        self._recorder.release()
        self._parts, self._inputs, self._output, self._alike = [], None, [], 0

    def _record(self, kind: Outline, given: Given) -> None:
        inputs = mapped(given, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
        self._before()
        self._let_go()
        self._quiet()
        try:
            with self._recorder.recording():
                result = self._record_parts(inputs)
        except Exception as error:
            self.release()
            if self._given_up is None:
                raise
            self._is_off = True
            self._given_up(error)
            return
        if outline(result) != self._last[1]:  # it was another step after all
            self.release()
            return
        self._inputs, self._output = (kind, inputs), [result]

    def _record_parts(self, inputs: Given) -> Result:
        self._recorder.begin_part()
        self._graph_breaks.at = self._act_between
        try:
            result = self._work(inputs)
        except Exception:
            with contextlib.suppress(RuntimeError):  # the first error is the reason
                self._recorder.end_part()
            raise
        finally:
            self._graph_breaks.at = operator.call
        self._parts.append(self._recorder.end_part())
        return result

    def _act_between(self, action: Action) -> None:
        self._parts += [self._recorder.end_part(), action]
        self._recorder.begin_part()


class CudaRecorder:
    """Records parts as CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which a call that waits for the device raises, before it can spoil the recording."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        waiting = torch.cuda.get_sync_debug_mode()
        # The backward pass, too, runs on this thread: a part has to end on the thread on which it began.
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(waiting)

    def begin_part(self) -> None:
        pool = self._graphs[0].pool() if self._graphs else None
        self._graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.stream(self._stream):
            # thread_local: the loader's and NCCL's threads may make any calls during the recording
            self._graphs[-1].capture_begin(pool, capture_error_mode="thread_local")

    def end_part(self) -> Action:
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # two actions in a row
            self._graphs[-1].capture_end()
        return self._graphs[-1].replay

    def release(self) -> None:
        if self._graphs:
            torch.cuda.synchronize()
            for graph in self._graphs:
                graph.reset()
            self._graphs = []
