"""Submits a part of the tied embedding's gradient to the CPU optimizer before the gradient is final.

A tied embedding is also the LM head. The backward pass computes the LM head's part of its gradient first and the
embedding's part last, and the next forward pass needs the embedding first. But the embedding's part is zero except in
the rows of the tokens. So the CPU optimizer gets the LM head's gradient at once, added to that of earlier micro-batches
("partial gradient"). It updates all other rows while the device works on the other layers, and the rows of the tokens
("open ranges") at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gptpar.config import Config
from gptpar.engine.collector import GradientCollector
from gptpar.engine.engine import Engine
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.offload.buckets import between, ranges_of_rows
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.topology.mesh import Mesh


def tied_unit(config: Config, layout: Mesh, table: ParameterTable, shared: str | None) -> Unit | None:
    """The tied embedding's unit if its partial gradient can be used: on a single process that offloads the unit.

    On several processes the gradient is summed over them first, and only a final gradient can be summed.

    Args:
        shared: name of the layer that is embedding and LM head at once; ``None``: there is none.
    """
    offload = config.offload
    if shared is None or layout.world_size > 1 or offload.offload_speculation == "off":
        return None
    if offload.gradients_leave_at_once:  # a partial gradient would stay on the device during the whole backward pass
        return None
    embedding = next(unit for unit in table.units if unit.name == shared)
    (param,) = embedding.params.values()
    padded = param.stop < embedding.length
    return None if padded or table.on_device[embedding.name] == embedding.length else embedding


class PartialGradient:
    """Submits the tied embedding's partial gradient, and tells the CPU optimizer which rows may still change.

    The final gradient may be written to the same memory while the partial one is copied to the host: outside of the
    open ranges both have the same bits. (If several micro-batches are summed, the sign of a zero may differ, which
    changes no update.)

    Args:
        unit: see :func:`tied_unit`.
        host: the CPU optimizer; ``None``: gradients are prepared, but not submitted.
        gradients: of the engine.
        graph_breaks: where the host acts between the launches of a step.
    """

    def __init__(self, unit: Unit, host: HostOptimizer | None, gradients: GradientCollector, graph_breaks: GraphBreaks):
        self._unit, self._host, self._gradients, self._graph_breaks = unit, host, gradients, graph_breaks
        self._on_device = gradients.memory.shards[unit.name].numel()
        self._sum = torch.empty(0)

    @staticmethod
    def of(
        unit: Unit | None, host: HostOptimizer | None, engine: Engine, stages: Sequence[Stage]
    ) -> PartialGradient | None:
        """Take the embedding's gradient as LM head from its layer, if the CPU optimizer can use it.

        Args:
            unit: see :func:`tied_unit`; ``None``: there is no partial gradient.
            host: the CPU optimizer.
            stages: this process's stages of the model.
        """
        if unit is None or (host is not None and host.partial_unit != unit.name):
            return None
        partial_gradient = PartialGradient(unit, host, engine.gradients, engine.graph_breaks)
        for layer in (layer for stage in stages for layer in stage.layers):
            if isinstance(layer, VocabParallelEmbedding):
                layer.on_output_grad = partial_gradient.submit
        return partial_gradient

    def expect_tokens(self, tokens: torch.Tensor) -> None:
        """A step begins, and its last micro-batch looks up these tokens: their rows are the open ranges.

        Earlier micro-batches do not matter, because the partial gradient includes them. Tokens on the device would have
        to be waited for: the step then uses no partial gradient.
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
            # Allocated at the beginning of the step: a recorded step must not use this memory for anything else.
            memory = self._gradients.memory.shard
            self._sum = torch.empty(self._unit.length - self._on_device, dtype=memory.dtype, device=memory.device)

    @torch.no_grad()
    def submit(self, grad: torch.Tensor, rows: slice) -> None:
        """Submit rows of the LM head's gradient, in some of which the embedding's gradient will be added.

        Args:
            grad: [vocabulary, width] of one micro-batch.
            rows: the rows computed since the last call.
        """
        if not self._gradients.in_last_forward:
            return
        memory, width, low = self._gradients.memory, grad.shape[1], self._on_device
        total, flat = memory.sum_of(self._unit), grad.reshape(-1)
        first, last = rows.start * width, rows.stop * width
        part = slice(max(low, first) - low, max(low, last) - low)
        if memory.single:
            torch.add(flat[first:last], 0.0, out=total[first:last])  # as autograd will add zeros: -0 becomes 0
            submitted = total[low:]
        else:  # autograd has not added this micro-batch to the sum yet, so the sum must not change here
            torch.add(total[low:][part], flat[low:][part], out=self._sum[part])
            submitted = self._sum
        if self._host is not None:
            self._graph_breaks.at(partial(self._host.submit_gradient, self._unit.name, submitted, formed=part.stop))
