"""A model divided into pipeline stages, and the passes of micro-batches through them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline.auxiliary_losses import AuxiliaryLosses
from gptpar.pipeline.layer_split import LayerSplit
from gptpar.pipeline.recompute import Keep
from gptpar.pipeline.runtime import Boundary, MicroBatch, Observer, Runtime, Transport
from gptpar.pipeline.schedules import Action, forward_only, instructions, interleaved
from gptpar.pipeline.stage import Fields, Stage
from gptpar.topology.groups import Topology

Of = TypeVar("Of")


class Pipeline(nn.Module):
    """Layers divided into the stages of a pipeline; each process builds its own layers only.

    Args:
        specs: of all layers, with names. The last layer's output is the loss.
        topology: this process's place on all axes.
        split: the assignment of layers to stages.
        build: makes a layer from its specification.
        boundary: shapes and dtypes between stages.
        num_virtual_stages: virtual stages of each process, for the interleaved schedule (arXiv 2104.04473).
        recompute: takes the names of a virtual stage's layers and returns groups of consecutive ones, which are
            recomputed in the backward pass.
        keep: how the inputs of such groups are kept.
        on_host: names of layers that are not recomputed and whose saved tensors go to the host.
        token_splits: number of tensor ranks that divide the tokens between layers (sequence parallelism).
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        topology: Topology,
        *,
        split: LayerSplit,
        build: Callable[[LayerSpec], nn.Module],
        boundary: Boundary,
        num_virtual_stages: int = 1,
        recompute: Callable[[Sequence[str]], Sequence[tuple[str, ...]]] = lambda names: (),
        keep: Keep | None = None,
        on_host: Collection[str] = (),
        token_splits: int = 1,
    ):
        super().__init__()
        self.specs, self.topology, self._boundary = specs, topology, boundary
        self.num_stages, self.stage = topology.mesh.pipeline, topology.stage
        self.num_virtual_stages, self.split, self.bounds = num_virtual_stages, split, split.bounds
        self.auxiliary = AuxiliaryLosses([name for spec in specs for name in spec.auxiliary_losses], token_splits)
        self.chunks = nn.ModuleList(self._build_stages(build, recompute, keep, on_host))
        self._transport = None if topology.links is None else Transport(topology.links)
        self.tied_stages = split.tied_stages(specs)
        groups = {name: topology.group_of_stages(stages) for name, stages in self.tied_stages.items()}
        self.tied_groups = {name: group for name, group in groups.items() if group is not None}

    def _build_stages(
        self,
        build: Callable[[LayerSpec], nn.Module],
        recompute: Callable[[Sequence[str]], Sequence[tuple[str, ...]]],
        keep: Keep | None,
        on_host: Collection[str],
    ) -> Iterator[Stage]:
        """This process's virtual stages; a tied layer that several of them have is one module."""
        tied: dict[str, nn.Module] = {}
        for part in range(self.stage, len(self.bounds) - 1, self.num_stages):
            mine = self.specs[self.bounds[part] : self.bounds[part + 1]]
            groups = recompute([spec.name for spec in mine])
            how: dict[str, Any] = {"recompute": groups, "keep": keep, "on_host": on_host}
            yield Stage(mine, build=build, tied=tied, auxiliary=self.auxiliary, **how)

    def by_unit(self, of_layers: Mapping[str, Of]) -> dict[str, Of]:
        """Unit of this process -> what its layer has; see :meth:`Stage.units_by_layer`."""
        units = {layer: units for stage in self.stages_here for layer, units in stage.units_by_layer().items()}
        return {unit: value for layer, value in of_layers.items() for unit in units.get(layer, ())}

    @property
    def stages_here(self) -> list[Stage]:
        """This process's virtual stages."""
        return list(self.chunks)  # type: ignore[arg-type]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        grad: torch.Tensor | None = None,
        observer: Observer | None = None,
    ) -> list[torch.Tensor]:
        """Run the schedule: gradients are added to the parameters' ``.grad``.

        Args:
            micro_batches: (input, fields by name) of each, the same on all stages.
            grad: scalar, incoming gradient of each micro-batch's loss; default 1.
            observer: called around each forward and backward pass.

        Returns:
            The micro-batches' losses in the order of computation, if this process has the last layer; else nothing.
        """
        return self._run(interleaved, micro_batches, grad, observer)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], take_output: Callable[[torch.Tensor], None] = lambda y: None
    ) -> list[torch.Tensor]:
        """The micro-batches' losses without gradients, if this process has the last layer; else nothing.

        Args:
            take_output: takes each output of the last layer.
        """

        def to_loss(y: torch.Tensor, fields: Fields) -> torch.Tensor:
            take_output(y)
            return self._loss_of(y, fields)

        return self._run(forward_only, micro_batches, None, None, to_loss)

    @torch.no_grad()
    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The last layer's output for each micro-batch, if this process has that layer; else nothing.

        Neither gradients nor losses are computed.
        """
        return self._run(forward_only, micro_batches, None, None, to_loss=lambda y, fields: y)

    def _run(
        self,
        order: Callable[[int, int, int, int], Iterator[Action]],
        micro_batches: Sequence[MicroBatch],
        grad: torch.Tensor | None,
        observer: Observer | None,
        to_loss: Callable[[torch.Tensor, Fields], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        count = len(micro_batches)
        if self.auxiliary.names:
            self.auxiliary.begin(count, grad)
        runtime = Runtime(
            self.stages_here,
            self.stage,
            self.num_stages,
            self._transport,
            self._boundary,
            to_loss or self._loss_of,
            micro_batches,
            grad,
            observer or Observer(),
        )
        runtime.run(instructions(order, self.stage, self.num_stages, count, self.num_virtual_stages))
        return runtime.losses

    def _loss_of(self, y: torch.Tensor, fields: Fields) -> torch.Tensor:
        """A micro-batch's loss, from the last layer's output."""
        return y
