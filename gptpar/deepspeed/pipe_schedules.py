"""``deepspeed.runtime.pipe.schedule``: DeepSpeed's schedules of a pipeline as lists of instructions. Pure.

Programs print and count them. The engine itself runs the schedules of :mod:`gptpar.pipeline.schedules`. On stage s of S
the forward pass of micro-batch m is in step 2m + s of training, and its backward pass in step 2(m + S) - 1 - s. Source:
deepspeed/runtime/pipe/schedule.py, DeepSpeed 0.19.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """Something that a stage does; its keyword arguments are attributes."""

    def __init__(self, **kwargs: Any):
        self.name, self.kwargs = type(self).__name__, kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Sum gradients over the data axis."""


class ReduceTiedGrads(PipeInstruction):
    """Sum gradients of tied layers over their stages."""


class BufferOpInstruction(PipeInstruction):
    """Something that is done to the micro-batch in a buffer."""

    def __init__(self, buffer_id: int, **kwargs: Any):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch's inputs or labels."""


class ForwardPass(BufferOpInstruction):
    """Run the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Run their backward pass."""


class SendActivation(BufferOpInstruction):
    """Send the output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the input's gradient to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the output's gradient from the next stage."""


class PipeSchedule(ABC):
    """One stage's instructions, step by step.

    Args:
        micro_batches: number of them in a batch.
        stages: number of stages.
        stage_id: this one.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.num_micro_batches, self.num_stages, self.stage = micro_batches, stages, stage_id
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches that are in memory at a time."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _is_there(self, micro_batch: int) -> bool:
        return 0 <= micro_batch < self.micro_batches


class InferenceSchedule(PipeSchedule):
    """Forward passes alone."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            current = step - self.stage
            own, other = (step + self.stage) % 2, (step + self.stage + 1) % 2
            sends = [SendActivation(other)] if self._is_there(current - 1) and not self.is_last_stage else []
            receives, computes = [], []
            if self._is_there(current):
                loads = self.is_first_stage or self.is_last_stage
                receives = [] if self.is_first_stage else [RecvActivation(own)]
                computes = [*([LoadMicroBatch(own)] if loads else []), ForwardPass(own)]
            # Neighbours do it in different orders, so that one sends while the other receives.
            yield [*sends, *receives, *computes] if self.stage % 2 == 0 else [*receives, *sends, *computes]

    def num_pipe_buffers(self) -> int:
        """Two: one is filled while the other is sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """Each stage alternates between forward and backward passes (1F1B)."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for step in range(last + 1):
            (current, is_forward), (before, _) = self._micro_batch(step), self._micro_batch(step - 1)
            own, other = current % self.num_pipe_buffers(), before % self.num_pipe_buffers()
            has_neighbour = not (self.is_first_stage if is_forward else self.is_last_stage)
            receive, send = (RecvActivation, SendGrad) if is_forward else (RecvGrad, SendActivation)
            sends = [send(other)] if has_neighbour and self._is_there(before) else []
            receives = [receive(own)] if has_neighbour and self._is_there(current) else []
            computes = self._passes(own, is_forward) if self._is_there(current) else []
            finish = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == last else []
            yield [*(sends + receives if is_forward else receives + sends), *computes, *finish]

    def _passes(self, buffer: int, is_forward: bool) -> list[PipeInstruction]:
        if not is_forward:
            return [BackwardPass(buffer)]
        loads = [LoadMicroBatch(buffer)] if self.is_first_stage or self.is_last_stage else []
        return [*loads, ForwardPass(buffer)]

    def _micro_batch(self, step: int) -> tuple[int, bool]:
        """(the micro-batch of a step, which may not exist; whether it is its forward pass)."""
        if (step - self.stage) % 2 == 0:
            return (step - self.stage) // 2, True
        return (step + 1 + self.stage) // 2 - self.stages, False

    def num_pipe_buffers(self) -> int:
        """As many as there are stages from this one on, at least two."""
        return max(2, min(self.stages - self.stage, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """One stage: each micro-batch's passes follow each other."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            finish = [ReduceGrads(), OptimizerStep()] if micro_batch == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *finish]

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1
