"""Makes a checkpoint of ours from one of Megatron's, tensor by tensor.

Since version 2 of Megatron's checkpoints QKV rows are ordered by group, as ours are. A tensor rank there has the same
split of a parameter as our parameter's declared placement gives it here. So splits are joined along the declared dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from gptpar.checkpoint.patches import ParameterView
from gptpar.checkpoint.streamed import StreamedCheckpoint, StreamedPart, write_checkpoint
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.errors import CheckpointError
from gptpar.exchange.files.distcp import METADATA
from gptpar.exchange.files.new_folder import new_folder, why_not_new
from gptpar.exchange.files.safe_pickle import is_whole
from gptpar.exchange.files.safetensors_file import NAME_OF
from gptpar.exchange.finite import Finite
from gptpar.exchange.megatron.arguments import count_in, model_of
from gptpar.exchange.megatron.found import WEIGHTS, Found, RankPart
from gptpar.exchange.megatron.progress import progress_meta
from gptpar.exchange.megatron.rank_files import open_rank_files
from gptpar.exchange.megatron.torch_dist import COMMON, open_torch_dist
from gptpar.exchange.megatron.universal import FOLDER as UNIVERSAL
from gptpar.exchange.megatron.universal import open_universal
from gptpar.exchange.meta import converted_meta
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage
from gptpar.topology.mesh import TENSOR
from gptpar.topology.placement import ParameterInfo

MAX_LISTED = 8
MAX_GROWTH = 16
"""Bytes of our checkpoint for each byte of Megatron's; weights of 8 bits grow to 4 times their bytes."""
_CHECKPOINT = r"(?:iter_|global_step)(\d{1,18})(_universal)?"


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint that has been opened; each tensor of the model is there and has the right size.

    Attributes:
        found: the files' contents.
        model: the model that the checkpoint's arguments describe.
        infos: our global name -> shape and placement.
    """

    found: Found
    model: ModelConfig
    infos: Mapping[str, ParameterInfo]

    def write(self, file: StreamedCheckpoint) -> None:
        """Write all tensors of our checkpoint, in the order in which Megatron's files are read fastest.

        Raises:
            CheckpointError: values are not finite, or the disk refuses.
        """
        finite = Finite()
        for kind, parts in self.found.states.items():
            for name in parts:
                if name in self.infos:
                    self._write_tensor(file, kind, name, finite)
        finite.require(self.found.path)

    def _write_tensor(self, file: StreamedCheckpoint, kind: str, name: str, finite: Finite) -> None:
        """Write a parameter of ours, or an optimizer state of it: fp64 if Megatron's tensor is fp64, else fp32."""
        info = self.infos[name]
        splits = [part.read() for part in self.found.states[kind][name]]
        tensors = [tensor for one in splits for tensor in one]
        if not all(tensor.dtype in NAME_OF and is_whole(tensor) for tensor in tensors):
            raise CheckpointError(
                f"{kind} of {name!r} in {self.found.path} is no plain tensor of {', '.join(map(str, NAME_OF))}"
            )
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        file.write(f"{kind}/{name}", tuple(info.shape), dtype, list(_parts(info, splits)), finite.look)


def _parts(info: ParameterInfo, splits: Sequence[Sequence[torch.Tensor]]) -> Iterator[StreamedPart]:
    """Each rank's split at its place in the parameter; the first one, where all ranks have all of it."""
    split = info.placement.value.get(TENSOR)
    if split is None or len(splits) == 1:
        yield StreamedPart(ParameterView(info.shape, lambda whole: whole), splits[0])
        return
    dim, start = split.dim, 0
    row = prod(info.shape) // info.shape[dim]
    for one in splits:
        size = sum(tensor.numel() for tensor in one) // row
        yield StreamedPart(ParameterView(info.shape, partial(torch.narrow, dim=dim, start=start, length=size)), one)
        start += size


def open_megatron(folder: Path) -> MegatronModel:
    """Open a checkpoint folder, or the newest in a folder of checkpoints; tensors are not read yet.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """
    path = _newest(folder)
    if (path / METADATA).exists() or (path / COMMON).exists():
        found = open_torch_dist(path)
    elif (path / UNIVERSAL).is_dir():
        found = open_universal(path)
    else:
        found = open_rank_files(path)
    version = found.beside.get("checkpoint_version", 0.0)
    if type(version) not in (int, float) or version < 2:
        told = version if type(version) in (int, float) else "unknown"
        raise CheckpointError(
            f"{path} is of version {told} of Megatron's checkpoints, whose QKV rows are in another order; "
            "load and save it with a newer Megatron-LM once"
        )
    if not found.states[WEIGHTS].get("embedding.weight"):
        raise CheckpointError(f"{path} has no word embedding: a file of it is missing")
    elements = sum(map(_numel, found.states[WEIGHTS].get("embedding.weight", ())))
    rows = elements // (count_in(vars(found.arguments), "hidden_size") or 1)
    model = model_of(found.arguments, rows, path)
    infos = Stage(gpt_model(model).specs).infos()
    _require_proportion(path, 4 * len(found.states) * sum(info.shape.numel() for info in infos.values()))
    problems = [problem for kind in found.states for problem in _mismatches(found, kind, infos, model.tied)]
    if problems:
        told = "\n".join(problems[:MAX_LISTED])
        raise CheckpointError(f"the weights in {path} are not those of its arguments:\n{told}")
    return MegatronModel(found, model, infos)


def _require_proportion(path: Path, num_bytes: int) -> None:
    """Many names may share the bytes of one tensor, and padding takes none: a small folder could fill any disk.

    Args:
        num_bytes: of the checkpoint to be made.

    Raises:
        CheckpointError: the folder has far fewer bytes.
    """
    there = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if num_bytes > MAX_GROWTH * there:
        raise CheckpointError(
            f"{path} has {there:,} bytes, and its arguments describe {num_bytes:,} bytes of tensors in fp32: its names "
            "share bytes, or its arguments are not those of its weights"
        )


def import_megatron(source: Path, target: Path) -> Path:
    """Make a checkpoint of ours from one of Megatron's; the source stays as it is.

    With the optimizer's state the new checkpoint has the same iteration, and a run can go on from it. With weights
    alone it has iteration 0.

    Args:
        target: a new folder of checkpoints.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: with what is wrong.
    """
    if problem := why_not_new(target):
        raise CheckpointError(problem)
    opened = open_megatron(source)
    found, rows = opened.found, opened.model.padded_vocab_size
    size = _vocab_size(found)
    known = size if size and size <= rows else None
    meta = converted_meta(opened.model, TokenizerConfig(vocab_size=known or rows), "megatron", vocab_size=known)
    iteration = 0
    if found.steps is not None:
        meta |= progress_meta(found, opened.model.seq_length)
        iteration = meta["progress"]["iteration"]
    with new_folder(target) as folder:
        path = write_checkpoint(folder, iteration, opened.write, meta)
    return target / path.name


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a folder of checkpoints; else the folder itself.

    Of a checkpoint and its universal form the universal one is taken.
    """
    inside = [path for path in folder.iterdir() if path.is_dir()]
    found = [(re.fullmatch(_CHECKPOINT, path.name), path) for path in inside]
    numbered = [(int(name[1]), name[2] or "", path) for name, path in found if name]
    release = [path for path in inside if path.name == "release"]
    return max(numbered)[2] if numbered else [*release, folder][0]


def _vocab_size(found: Found) -> int | None:
    """The number of token ids without padding; ``None``: the checkpoint does not say it."""
    info = found.beside.get("universal_checkpoint_info")
    of_info = count_in(info, "original_vocab_size") if isinstance(info, dict) else None
    return of_info or count_in(vars(found.arguments), "vocab_size")


def _mismatches(found: Found, kind: str, infos: Mapping[str, ParameterInfo], tied: bool) -> Iterator[str]:
    """A sentence for each tensor that is missing, has no place in the model, or has another number of elements."""
    states, of_kind = found.states[kind], "" if kind == WEIGHTS else f"{kind} of "
    names = states.keys() - ({"output.weight"} if tied else set())
    yield from (f"{of_kind}{name!r} is missing" for name in sorted(infos.keys() - names))
    yield from (f"{of_kind}{name!r} has no place in the model" for name in sorted(names - infos.keys()))
    for name in sorted(names & infos.keys()):
        info, parts = infos[name], states[name]
        split = info.placement.value.get(TENSOR)
        whole = sum(map(_numel, parts)) if split is not None else _numel(parts[0])
        row = 1 if split is None else prod(info.shape) // info.shape[split.dim]
        uneven = any(_numel(part) % row for part in parts)
        if whole != info.shape.numel() or len(parts) != found.num_ranks or uneven:
            sizes = [list(part.shape) for part in parts]
            yield (
                f"{of_kind}{name!r} is {list(info.shape)} in the model, and the {found.num_ranks} ranks have {sizes}"
            )


def _numel(part: RankPart) -> int:
    return torch.Size(part.shape).numel()
