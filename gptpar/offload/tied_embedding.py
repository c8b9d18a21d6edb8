"""The tied embedding's gradient goes to the CPU optimizer in part before it is final.

A tied embedding gets its gradient as output layer first, before the backward pass of any other layer, and its gradient
as lookup last; and the next forward pass begins with it. The lookup has a gradient only in the rows of its tokens. So
the CPU optimizer gets the output layer's gradient, with what earlier micro-batches have added, at once ("partial
gradient"). It updates the embedding while the device is at the other layers, and those rows ("open ranges") at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gptpar.config import Config
from gptpar.engine.engine import Engine
from gptpar.engine.gradients import Gradients
from gptpar.engine.step_graph import Cuts
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.index_ranges import between, ranges_of_rows
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.topology.layout import Layout


def tied_unit(config: Config, layout: Layout, table: ParameterTable, shared: str | None) -> Unit | None:
    """The tied embedding's unit, if its partial gradient may be submitted: on a single process, where it is offloaded.

    On several processes a gradient is summed over them first, for which it must be final.

    Args:
        shared: name of the layer that is embedding and LM head at once; ``None``: there is none.
    """
    offload = config.offload
    if shared is None or layout.world_size > 1 or offload.offload_speculation == "off":
        return None
    if offload.gradients_leave_at_once:  # this one would stay on the device during the whole backward pass
        return None
    embedding = next(unit for unit in table.units if unit.name == shared)
    (param,) = embedding.params.values()
    padded = param.stop < embedding.length
    return None if padded or table.on_device[embedding.name] == embedding.length else embedding


class PartialGradient:
    """Submits the tied embedding's partial gradient, and tells the CPU optimizer in which rows it will change.

    Args:
        unit: see :func:`tied_unit`.
        host: ``None``: nobody is told.
        gradients: of the engine. Every row to which nothing is added later keeps its bits, so that the final gradient
            may be written over memory on its way to the host (but the sign of a zero may differ where several
            micro-batches are summed, which changes no update).
        cuts: where the host acts amid the launches of a step.
    """

    def __init__(self, unit: Unit, host: HostOptimizer | None, gradients: Gradients, cuts: Cuts):
        self._unit, self._host, self._gradients, self._cuts = unit, host, gradients, cuts
        self._on_device = gradients.shards[unit.name].numel()
        self._sum = torch.empty(0)

    @staticmethod
    def of(
        unit: Unit | None, host: HostOptimizer | None, engine: Engine, stages: Sequence[Stage]
    ) -> PartialGradient | None:
        """Watch for the gradient that the embedding has as output layer, if the CPU optimizer can use it.

        Args:
            host: the CPU optimizer, attached for this unit.
            stages: of the model on this process.
        """
        if unit is None or (host is not None and host.partial_unit != unit.name):
            return None
        partial_gradient = PartialGradient(unit, host, engine.gradients, engine.cuts)
        for layer in (layer for stage in stages for layer in stage.layers):
            if isinstance(layer, VocabParallelEmbedding):
                layer.on_output_grad = partial_gradient.submit
        return partial_gradient

    def expect_tokens(self, tokens: torch.Tensor) -> None:
        """A step begins whose last micro-batch looks up these tokens: the sum has the changes of earlier ones already.

        Tokens that are on the device are not waited for: without knowing them, no partial gradient is used.
        """
        if self._host is None or tokens.device.type != "cpu":
            return
        (param,) = self._unit.params.values()
        num_rows, width = param.shape
        ranges = ranges_of_rows(tokens.flatten().numpy(), num_rows, width)
        offloaded = between(ranges, self._on_device, param.stop) - self._on_device
        self._host.expect_open_ranges(self._unit.name, offloaded)

    def begin(self, num_micro_batches: int) -> None:
        """A step's computation begins."""
        if num_micro_batches > 1:
            # Taken with the step, not when it is needed: a recorded step must use this memory for nothing else.
            memory = self._gradients.shard
            self._sum = torch.empty(self._unit.length - self._on_device, dtype=memory.dtype, device=memory.device)

    @torch.no_grad()
    def submit(self, grad: torch.Tensor, rows: slice) -> None:
        """Some rows of the output layer's gradient are formed; the lookup will add something in some of them.

        Args:
            grad: [vocabulary, width] of one micro-batch.
            rows: those after the ones of the call before.
        """
        if not self._gradients.collector.in_last_forward:
            return
        memory, width, low = self._gradients.memory, grad.shape[1], self._on_device
        total, flat = memory.sum_of(self._unit), grad.reshape(-1)
        first, last = rows.start * width, rows.stop * width
        part = slice(max(low, first) - low, max(low, last) - low)
        if memory.single:
            torch.add(flat[first:last], 0.0, out=total[first:last])  # as autograd will add zeros: -0 becomes 0
            submitted = total[low:]
        else:  # the sum itself is not complete, and stays as it is
            torch.add(total[low:][part], flat[low:][part], out=self._sum[part])
            submitted = self._sum
        if self._host is not None:
            self._cuts.at(partial(self._host.submit_gradient, self._unit.name, submitted, formed=part.stop))
