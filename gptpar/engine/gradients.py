"""Connects the stations of a step's gradients: collector and reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gptpar.engine.collector import GradientCollector
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.reducer import GradientReducer


class Gradients:
    """Tells the collector and the reducer how far the step is."""

    def __init__(self, memory: GradientMemory, collector: GradientCollector, reducer: GradientReducer):
        self.memory, self.collector, self.reducer = memory, collector, reducer

    @property
    def shard(self) -> torch.Tensor:
        """The final gradient of the elements that the device's optimizer updates: all units' in a row."""
        return self.memory.shard

    @property
    def shards(self) -> dict[str, torch.Tensor]:
        """The same by unit."""
        return self.memory.shards

    @property
    def are_exchanged(self) -> bool:
        """Whether processes have begun to sum gradients of this step."""
        return self.reducer.has_begun

    def begin(self, num_micro_batches: int) -> None:
        """A step begins."""
        self.reducer.begin()
        self.collector.begin()
        # A unit that two virtual stages share gets a second gradient even in a step of one micro-batch.
        self.memory.begin(num_micro_batches + self.collector.shares_units)

    def reopen(self, final: Mapping[str, Sequence[tuple[int, torch.Tensor]]]) -> None:
        """More backward passes of the step begin, after its gradient was final.

        Args:
            final: see :meth:`GradientReducer.reopen <gptpar.engine.reducer.GradientReducer.reopen>`.
        """
        self.memory.single = False
        self.collector.reopen()
        self.reducer.reopen(final)

    def begin_forward(self, *, last: bool) -> None:
        """A forward pass of a virtual stage begins; ``last``: it is the step's last for that stage."""
        self.collector.in_last_forward = last

    def begin_backward(
        self, virtual_stage: int, *, last: bool, factor: float = 1.0, ends_together: bool = False
    ) -> None:
        """See :meth:`GradientCollector.begin_backward <gptpar.engine.collector.GradientCollector.begin_backward>`."""
        self.collector.begin_backward(virtual_stage, last=last, factor=factor, ends_together=ends_together)

    def end_backward(self) -> None:
        """The pass is over: a parameter without a gradient counts as zero."""
        self.collector.end_backward()

    def finish(self) -> None:
        """All passes are over: wait for the reductions, and sum the gradients of tied units over their stages."""
        self.reducer.finish()

    def square(self) -> torch.Tensor:
        """Sum of squares (fp64 scalar on the device) of the elements that this process counts."""
        return self.reducer.square()
