"""The tied embedding's gradient goes to the CPU optimizer in part before it is final.

A tied embedding gets its gradient as output layer first, before the backward pass of any other layer, and its gradient
as lookup last; and the next forward pass begins with it. The lookup has a gradient only in the rows of its tokens. So
the CPU optimizer gets the output layer's gradient, with what earlier micro-batches have added, at once ("partial
gradient"). It updates the embedding while the device is at the other layers, and those rows ("open ranges") at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from gptpar.config import Config
from gptpar.engine.gradients import GradientSum
from gptpar.engine.units import Unit
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.index_ranges import between, ranges_of_rows
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.topology import Layout


def partial_unit(config: Config, layout: Layout, units: Sequence[Unit], on_device: Mapping[str, int]) -> Unit | None:
    """The tied embedding's unit, if its partial gradient may be submitted: on a single process, where it is offloaded.

    On several processes a gradient is summed over them first, for which it must be final.
    """
    if not config.model.tied or layout.world_size > 1 or config.offload.offload_speculation == "off":
        return None
    embedding = units[0]
    (slot,) = embedding.slots.values()
    padded = slot.stop < embedding.length
    return None if padded or on_device[embedding.name] == embedding.length else embedding


class PartialGradient:
    """Has the tied embedding's partial gradient submitted, and tells the CPU optimizer in which rows it will change.

    Args:
        unit: see :func:`partial_unit`.
        on_device: how many of its elements, the first ones, the device updates.
        host: ``None``: nobody is told.
    """

    def __init__(self, unit: Unit, on_device: int, host: HostOptimizer | None):
        self._unit, self._on_device, self._host = unit, on_device, host

    @staticmethod
    def of(
        unit: Unit | None,
        on_device: Mapping[str, int],
        host: HostOptimizer | None,
        stages: Sequence[Stage],
        gradients: GradientSum,
    ) -> PartialGradient | None:
        """Watch for the gradient that the embedding has as output layer, if the CPU optimizer can use it.

        Args:
            on_device: unit -> how many of its elements, the first ones, the device updates.
            host: the CPU optimizer, attached for this unit.
        """
        if unit is None or (host is not None and host.partial_unit != unit.name):
            return None
        (name,) = unit.slots
        for layer in (layer for stage in stages for layer in stage.layers):
            if isinstance(layer, VocabParallelEmbedding):
                layer.on_output_grad = partial(gradients.take_early, name)
        return PartialGradient(unit, on_device[unit.name], host)

    def expect_step(self, tokens: torch.Tensor) -> None:
        """A step begins whose last micro-batch looks up these tokens: the sum has the changes of earlier ones already.

        Tokens that are on the device are not waited for: without knowing them, no partial gradient is used.
        """
        if self._host is None or tokens.device.type != "cpu":
            return
        (slot,) = self._unit.slots.values()
        num_rows, width = slot.shape
        ranges = ranges_of_rows(tokens.flatten().numpy(), num_rows, width)
        offloaded = between(ranges, self._on_device, slot.stop) - self._on_device
        self._host.expect_open_ranges(self._unit.name, offloaded)
