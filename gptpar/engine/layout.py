"""Where this process's parameters lie in flat units, and who updates which elements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptpar.engine.data_axis import DataAxis
from gptpar.engine.runs import Division, divide, runs_of
from gptpar.engine.units import Unit
from gptpar.optim.spans import HostPiece, Run, cut
from gptpar.pipeline.module import PipelineModule
from gptpar.pipeline.stage import ParameterInfo, Stage
from gptpar.tensor_parallel import TensorAxis


@dataclass(frozen=True)
class UnitLayout:
    """Attributes:

    units: the layers' flat ranges, in forward order.
    infos: what is known of each parameter of this process, by global name.
    shard: which shard of each unit is this process's.
    runs: unit -> the ranges of its shard.
    """

    units: Sequence[Unit]
    infos: dict[str, ParameterInfo]
    shard: int
    division: Division
    runs: dict[str, list[Run]]

    @staticmethod
    def of(pipeline: PipelineModule, tensor: TensorAxis, data: DataAxis, ratio: float) -> UnitLayout:
        """Lay out the layers of this process."""
        stages: list[Stage] = list(pipeline.chunks)  # type: ignore[arg-type]
        infos = {k: v for stage in stages for k, v in stage.infos().items()}
        layers = {name: params for stage in stages for name, params in stage.parameters_by_layer().items()}
        units = [Unit.of(name, {p: infos[p] for p in params}, data.shards) for name, params in layers.items()]
        runs = {
            unit.name: list(
                runs_of(unit, data.shard, first_tensor_rank=tensor.rank == 0, copies=pipeline.copies),
            )
            for unit in units
        }
        return UnitLayout(units, infos, data.shard, divide(units, data.shard, ratio), runs)

    @property
    def on_device(self) -> dict[str, int]:
        """Unit -> how many of its shard's elements, the first ones, the device updates."""
        return self.division.on_device

    def offloaded(self) -> list[HostPiece]:
        """What of each unit's shard is not the device's, in forward order."""
        return [
            HostPiece(unit.name, unit.shard_length - kept, tuple(cut(self.runs[unit.name], kept, unit.shard_length)))
            for unit in self.units
            if (kept := self.on_device[unit.name]) < unit.shard_length
        ]
