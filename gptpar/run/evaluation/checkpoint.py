"""Loads a checkpoint's model in a layout for evaluation, without optimizer and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.ranks import Ranks
from gptpar.config import Flags, ModelConfig, ModelFlags, ParallelFlags
from gptpar.config.sections.parallel import check_parallel
from gptpar.config.stored import StoredModel
from gptpar.errors import CheckpointError, ConfigError
from gptpar.model.experts.dispatch import ExpertAxis
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import build_on_meta
from gptpar.pipeline.layer_split import split_model
from gptpar.pipeline.runtime import Pipeline
from gptpar.pipeline.stage import Fields, Stage
from gptpar.run.generation import LoadedStages, load_stages
from gptpar.tensor_parallel import TensorAxis
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import TENSOR


@dataclass(frozen=True)
class CheckpointModel:
    """A model to evaluate.

    Attributes:
        pipeline: the model as this process holds it.
        loaded: the checkpoint.
    """

    pipeline: Pipeline
    loaded: LoadedStages


def load_pipeline(folder: Path, topology: Topology, dtype: torch.dtype, iteration: int | None) -> CheckpointModel:
    """A run folder's newest whole checkpoint (or that of one iteration), split as the topology says.

    Raises:
        CheckpointError: no checkpoint can be read, or processes read different ones.
        ConfigError: the model cannot be split that way.
    """
    built: list[Pipeline] = []

    def build(stored: StoredModel) -> Sequence[Stage]:
        built[:] = [make_pipeline_without_engine(stored.model, topology, dtype)]
        return built[0].stages_here

    loaded = load_stages(folder, build, topology.device, dtype, iteration=iteration)
    if len(paths := set(Ranks(None).each(lambda: loaded.path.name))) > 1:
        raise CheckpointError(
            f"processes can read different checkpoints of {folder} ({', '.join(sorted(paths))}): name one with "
            "--ckpt-step N, or see gptpar inspect --verify"
        )
    return CheckpointModel(built[0], loaded)


def make_pipeline_without_engine(model: ModelConfig, topology: Topology, dtype: torch.dtype) -> Pipeline:
    """The layers of this process, without storage.

    Raises:
        ConfigError: the model cannot be split that way.
    """
    mesh = topology.mesh
    if problems := layout_problems(model, mesh.tensor, mesh.pipeline, mesh.expert, world_size=mesh.world_size):
        raise ConfigError(problems)
    axis = TensorAxis(mesh.tensor, topology.position(TENSOR), topology.group(TENSOR))

    def boundary(sender: int, x: torch.Tensor, fields: Fields) -> tuple[torch.Size, torch.dtype]:
        return torch.Size([x.numel(), model.hidden_size]), dtype

    return Pipeline(
        gpt_model(model, axis, experts=ExpertAxis.of(topology)).specs,
        topology=topology,
        split=split_model(gpt_model(model), mesh.pipeline, 1, "parameters"),
        build=build_on_meta,
        boundary=boundary,
    )


def layout_problems(model: ModelConfig, tensor: int, pipeline: int, expert: int, *, world_size: int) -> list[str]:
    """The reasons why a model cannot be split over the ranks of axes of these sizes, a sentence each."""
    known: dict[str, Any] = {spec.name: getattr(model, spec.name, None) for spec in dataclasses.fields(ModelFlags)}
    parallel = ParallelFlags(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )
    return list(check_parallel(Flags(model=ModelFlags(**known), parallel=parallel), world_size))
