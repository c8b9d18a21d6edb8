"""Loads a checkpoint's model without optimizer, whole or split over processes: to evaluate it, or to make text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gptpar.checkpoint import Manifest, find_checkpoints, first_usable, read_manifest, read_tensors
from gptpar.config import ModelConfig
from gptpar.config.stored import StoredModel, stored_model
from gptpar.errors import CheckpointError
from gptpar.exchange import why_not_to_load
from gptpar.model.experts.balance import ExpertBalance
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage, memory_for
from gptpar.run.resume import instead_of

T = TypeVar("T")


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype, iteration: int | None = None
) -> tuple[Stage, StoredModel]:
    """The model of a run folder's newest whole checkpoint (or of one iteration), ready to give logits.

    Raises:
        CheckpointError: none that can be read.
    """
    loaded = load_stages(
        folder, lambda stored: [Stage(gpt_model(stored.model).specs)], device, dtype, iteration=iteration
    )
    return loaded.stages[0], loaded.stored


@dataclass(frozen=True)
class LoadedStages:
    """A checkpoint's model, or the part of it that this process holds; without optimizer.

    Attributes:
        stages: with their weights, in evaluation mode.
        path, iteration: of the checkpoint.
    """

    stages: Sequence[Stage]
    stored: StoredModel
    path: Path
    iteration: int


def load_stages(
    folder: Path,
    build: Callable[[StoredModel], Sequence[Stage]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    iteration: int | None = None,
) -> LoadedStages:
    """Fill stages from a run folder's newest whole checkpoint, or from that of one iteration.

    Args:
        build: makes this process's stages, without storage; is called for each checkpoint that is tried.
        dtype: of the parameters.

    Raises:
        CheckpointError: none that can be read.
    """

    def use(path: Path) -> LoadedStages:
        try:
            manifest = read_manifest(path)
            stored = stored_model(path, manifest.meta)
            _require_its_tensors(path, manifest, stored.model)
            stages = build(stored)
            _fill(stages, path, manifest, stored.model, device, dtype)
        except CheckpointError as error:
            print(f"skipped a checkpoint: {error}", file=sys.stderr)
            raise
        return LoadedStages(stages, stored, path, manifest.iteration)

    return _first(folder, iteration, use)


def newest_model(folder: Path, iteration: int | None = None) -> StoredModel:
    """The model of the checkpoint that :func:`load_stages` tries first; no tensor is read.

    Raises:
        CheckpointError: none that can be read.
    """
    return _first(folder, iteration, lambda path: stored_model(path, read_manifest(path).meta))


def _candidates(folder: Path, iteration: int | None) -> list[Path]:
    """The checkpoints of a run folder, newest first, or that of one iteration.

    Raises:
        CheckpointError: there are none.
    """
    if problem := why_not_to_load(folder):
        raise CheckpointError(problem)
    there = find_checkpoints(folder)
    found = [path for number, path in there if iteration in (None, number)]
    if not found:
        what = "checkpoint" if iteration is None else f"checkpoint of iteration {iteration}"
        where = f"in {folder}" if folder.is_dir() else f"in {folder}, which does not exist"
        raise CheckpointError(f"there is no {what} {where}: {instead_of(there)}")
    return found


def _first(folder: Path, iteration: int | None, use: Callable[[Path], T]) -> T:
    """The result of ``use`` on the newest checkpoint that it accepts."""
    problems: list[str] = []
    if (found := first_usable(_candidates(folder, iteration), use, problems)) is None:
        raise CheckpointError(f"no checkpoint in {folder} can be read:\n" + "\n".join(problems))
    return found


def _fill(
    stages: Sequence[Stage],
    path: Path,
    manifest: Manifest,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give stages the weights of a checkpoint: of each parameter the split that they have."""
    infos = {name: info for stage in stages for name, info in stage.infos().items()}
    _require_shapes(path, manifest, {name: tuple(info.full_shape) for name, info in infos.items()})
    boxes = {f"weights/{name}": (info.offsets, tuple(info.shape)) for name, info in infos.items()}
    weights = read_tensors(path, boxes, manifest, boxes)
    values = {name: weights.pop(f"weights/{name}").to(device, dtype, copy=True) for name in infos}
    for stage in stages:
        stage.place(values | memory_for(stage.buffer_infos(), device))
        stage.eval().requires_grad_(False)
    experts = ExpertBalance(model, gpt_model(model).specs, torch.promote_types(dtype, torch.float32), device)
    experts.load(manifest.meta.get("experts"))
    for stage in stages:
        experts.attach(stage.layers_by_name())


def _require_its_tensors(path: Path, manifest: Manifest, model: ModelConfig) -> None:
    """A model larger than its checkpoint is not built: who wrote the sizes may have written any.

    Raises:
        CheckpointError: a size that no tensor has.
    """
    largest = max((size for entry in manifest.tensors.values() for size in entry.shape), default=0)
    sizes = ["hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "padded_vocab_size"]
    sizes += ["num_experts", "moe_ffn_hidden_size"]
    limits = {"num_layers": len(manifest.tensors)} | dict.fromkeys(sizes, largest)
    if not all(model.blocks_with_experts(model.num_layers)):
        limits["ffn_hidden_size"] = largest
    for name, limit in limits.items():
        if (getattr(model, name) or 0) > limit:
            raise CheckpointError(
                f"the meta of {path} says {name} {getattr(model, name):,}, but it holds {len(manifest.tensors):,} "
                f"tensors, none longer than {largest:,}; take another checkpoint with --ckpt-step N"
            )


def _require_shapes(path: Path, manifest: Manifest, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        entry = manifest.tensors.get(f"weights/{name}")
        if entry is not None and entry.shape != shape:
            raise CheckpointError(
                f"tensor 'weights/{name}' of {path} is {list(entry.shape)}, and {list(shape)} in the model that its "
                "meta describes; take another checkpoint with --ckpt-step N"
            )
