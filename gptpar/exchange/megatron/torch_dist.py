"""Reads Megatron-LM's torch_dist format, saved in any layout.

    iter_0000010/common.pt                  arguments, iteration, scheduler, the optimizer's counters
    iter_0000010/.metadata, __R_I.distcp    tensors, in torch.distributed.checkpoint's format

Each tensor is stored whole, under Megatron Core's name. A parameter of the layers is either one tensor whose first dim
is the layers (``decoder.layers.mlp.linear_fc2.weight``), or one tensor for each layer. The optimizer's states have the
same names after a prefix such as ``optimizer.state.exp_avg.``. They have the same shapes if they were saved fully
reshardable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.distcp import DistcpFolder
from gptpar.exchange.files.safe_pickle import load_torch_file
from gptpar.exchange.hf_folder import MAX_LAYERS
from gptpar.exchange.megatron.found import MOMENTS, WEIGHTS, Found, Parts, RankPart, steps_in, with_arguments
from gptpar.exchange.megatron.names import EVERY_LAYER, our_name

COMMON = "common.pt"
MASTERS = "fp32_param"
_OF_OPTIMIZER = re.compile(rf"(?:chained_0\.)?optimizer\.state\.({'|'.join((MASTERS, *MOMENTS))})\.(.+)")
_NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\..*|.*_extra_state.*|rng_state.*|rerun_state_machine_state.*")


def open_torch_dist(path: Path) -> Found:
    """Open one checkpoint; tensors are not read yet.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """
    common = load_torch_file(path / COMMON)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path / COMMON} holds no state of a run")
    folder = DistcpFolder(path)
    weights = [name for name in folder.tensors if not _NO_WEIGHT.fullmatch(name)]
    keys: dict[str, dict[str, str]] = {WEIGHTS: {name: name for name in weights}}
    for key in folder.tensors:
        if found := _OF_OPTIMIZER.fullmatch(key):
            keys.setdefault(found[1], {})[found[2]] = key
    steps = steps_in(common.get("optimizer"))
    kinds = _with_optimizer(folder, keys) if steps is not None else None
    states = {kind: _parts(folder, found) for kind, found in (kinds or {WEIGHTS: keys[WEIGHTS]}).items()}
    arguments = with_arguments(common.get("args"), path / COMMON)
    return Found(path, arguments, common, 1, states, steps if kinds else None)


def _with_optimizer(folder: DistcpFolder, keys: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]] | None:
    """Kind -> its tensors by name, with weights of fp32; ``None`` unless all kinds have the weights' shapes."""
    weights = keys[WEIGHTS]
    shapes = {name: folder.tensors[name].shape for name in weights}
    is_fp32 = all(folder.tensors[name].dtype in (torch.float32, torch.float64) for name in weights)
    masters = keys.get(MASTERS, weights if is_fp32 else {})
    kinds = {WEIGHTS: masters, **{moment: keys.get(moment, {}) for moment in MOMENTS}}
    complete = all({name: folder.tensors[key].shape for name, key in one.items()} == shapes for one in kinds.values())
    return kinds if complete else None


def _parts(folder: DistcpFolder, keys: Mapping[str, str]) -> Parts:
    """Tensors by our name; the layers of one tensor follow each other.

    Raises:
        CheckpointError: a tensor corresponds to no parameter of ours.
    """
    return {ours: [part] for name, key in keys.items() for ours, part in _layers(folder, our_name(name), key)}


def _layers(folder: DistcpFolder, ours: str, key: str) -> Iterator[tuple[str, RankPart]]:
    shape = folder.tensors[key].shape
    if not ours.startswith(EVERY_LAYER):
        yield ours, RankPart(shape, partial(_read, folder, key))
        return
    for index in range(min(shape[0] if shape else 0, MAX_LAYERS)):
        name = ours.replace(EVERY_LAYER, f"layers.{index}.")
        yield name, RankPart(shape[1:], partial(_read, folder, key, index))


def _read(folder: DistcpFolder, key: str, index: int | None = None) -> list[torch.Tensor]:
    return [folder.read(key, index)]
