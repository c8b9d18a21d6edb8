"""``deepspeed.utils.zero_to_fp32``: the whole weights of an engine's checkpoint in fp32, without an engine."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from gptpar.checkpoint import DamagedCheckpoint, read_manifest, read_tensors
from gptpar.deepspeed.engines.stored_state import read_state, room_for_client
from gptpar.deepspeed.engines.tags import candidates
from gptpar.errors import CheckpointError, ConfigError
from gptpar.exchange import shards_of
from gptpar.system.files import write_synced
from gptpar.system.quantities import read_bytes

Folder = str | os.PathLike[str]
StateDict = dict[str, torch.Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> StateDict:
    """The module's state in host memory: master weights, frozen weights and persistent buffers, by their names.

    Weights are fp32 or wider, buffers as they are. Tied weights are one tensor under each of their names.

    Args:
        checkpoint_dir: the folder that ``save_checkpoint`` was given.
        tag: of the checkpoint; default: as ``load_checkpoint`` chooses.
        exclude_frozen_parameters: leave out weights that were not trained.
        lazy_mode: without effect: all tensors are read.

    Raises:
        CheckpointError: there is no undamaged checkpoint.
    """
    damaged = []
    for _, path in candidates(Path(checkpoint_dir), tag):
        try:
            manifest = read_manifest(path)
            known = read_state(path, manifest.meta, room_for_client(manifest))
            frozen = known.frozen if exclude_frozen_parameters else []
            stored = {name.partition("/")[2]: name for name in manifest.tensors if name[:8] in ("weights/", "buffers/")}
            stored = {name: place for name, place in stored.items() if name not in frozen}
            values = read_tensors(path, stored.values(), manifest)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            continue
        state = {name: _in_fp32(values[place]) if place[0] == "w" else values[place] for name, place in stored.items()}
        state |= {name: torch.view_as_complex(state[name]) for name in known.complex_buffers if name in state}
        return state | {name: state[first] for name, first in known.aliases.items() if first in state}
    raise CheckpointError("\n".join([f"there is no whole checkpoint in {checkpoint_dir}.", *damaged]))


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """The model in host memory, with the weights of :func:`get_fp32_state_dict_from_zero_checkpoint`."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write :func:`get_fp32_state_dict_from_zero_checkpoint` as files that transformers reads.

    Args:
        output_dir: receives ``pytorch_model.bin`` or ``model.safetensors``; several such files and their index if one
            would be larger than ``max_shard_size``.
        max_shard_size: bytes of a file, such as ``5GB``; ``None``: one file.
        safe_serialization: write safetensors files, by the package of that name.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    folder = Path(output_dir)
    sizes = {name: value.nbytes for name, value in state.items()}
    shards = shards_of(sizes, _size(max_shard_size), stem, ending)
    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in shards.items():
        if safe_serialization:
            from safetensors.torch import save_file

            save_file({key: state[key].clone() for key in keys}, folder / name, metadata={"format": "pt"})
        else:
            torch.save({key: state[key] for key in keys}, folder / name)
    if len(shards) > 1:
        places = {key: name for name, keys in shards.items() for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        write_synced(folder / f"{stem}.{ending}.index.json", json.dumps(index, indent=2) + "\n")


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """DeepSpeed's files of the optimizer's state in a folder of a checkpoint, in the order of their numbers.

    Raises:
        FileNotFoundError: there is none, as in a checkpoint of gptpar's.
    """
    found = [str(path) for path in Path(checkpoint_dir).glob("*_optim_states.pt")]
    if not found:
        raise FileNotFoundError(f"there is no file *_optim_states.pt in {checkpoint_dir}.")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _size(text: str | int | None) -> float:
    if text is None:
        return float("inf")
    with suppress(ValueError):
        if (size := read_bytes(str(text))) >= 0:
            return size
    raise ConfigError([f"max_shard_size {text!r} is no number of bytes: write it such as 5GB or 500MB."])
