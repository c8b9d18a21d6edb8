"""The tied embedding's gradient goes to the CPU optimizer before it is complete.

As an output layer the embedding has its gradient before the backward pass begins, as a lookup when that ends; and the
next forward pass begins with it. But a lookup has a gradient in the rows of its tokens only. So the CPU gets the output
layer's, with what earlier micro-batches have added, with the loss, works with it while the device is at the layers, and
leaves those rows for the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from gptpar.config import Config
from gptpar.engine.gradients import GradientSum
from gptpar.engine.units import Unit
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.row_ranges import between, ranges_of_rows
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.topology import Layout


def early_unit(config: Config, layout: Layout, units: Sequence[Unit], on_device: Mapping[str, int]) -> Unit | None:
    """The unit whose gradient may be offered early: of a single process the tied embedding, as far as it is the host's.

    Others' would be summed over processes first, for which it must be complete.
    """
    offload = config.offload
    if not config.model.tied or layout.world_size > 1 or offload.offload_speculation == "off":
        return None
    if offload.gradients_leave_at_once:  # this one would stay on the device during the whole backward pass
        return None
    embedding = units[0]
    (slot,) = embedding.slots.values()
    padded = slot.stop < embedding.length
    return None if padded or on_device[embedding.name] == embedding.length else embedding


class EarlyRows:
    """Has the gradient offered early, and tells the host in which rows it will change.

    Args:
        unit: see :func:`early_unit`.
        kept: how many of its elements, the first ones, the device updates.
        host: ``None``: nobody is told.
    """

    def __init__(self, unit: Unit, kept: int, host: HostOptimizer | None):
        self._unit, self._kept, self._host = unit, kept, host

    @staticmethod
    def of(
        unit: Unit | None,
        on_device: Mapping[str, int],
        host: HostOptimizer | None,
        stages: Sequence[Stage],
        gradients: GradientSum,
    ) -> EarlyRows | None:
        """Watch for the gradient that the embedding has as an output layer, if the host has room to use it."""
        if unit is None or (host is not None and not host.keep_values(unit.name)):
            return None
        (name,) = unit.slots
        for layer in (layer for stage in stages for layer in stage.layers):
            if isinstance(layer, VocabParallelEmbedding):
                layer.on_output_grad = partial(gradients.take_early, name)
        return EarlyRows(unit, on_device[unit.name], host)

    def expect_step(self, tokens: torch.Tensor) -> None:
        """A step begins that looks up these tokens last: in rows looked up earlier the sum has its changes already.

        Tokens that are on the device are not waited for: without knowing them, the host uses no early gradient.
        """
        if self._host is None or tokens.device.type != "cpu":
            return
        (slot,) = self._unit.slots.values()
        num_rows, width = slot.shape
        ranges = ranges_of_rows(tokens.flatten().numpy(), num_rows, width)
        self._host.expect_changes(self._unit.name, between(ranges, self._kept, slot.stop) - self._kept)
