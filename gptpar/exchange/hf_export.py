"""Writes a checkpoint as a Hugging Face folder: number format, sizes of shards, configuration, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import Manifest, read_manifest
from gptpar.checkpoint.assembly import Assembly, FileBlock, NewTensor, Reading, Room
from gptpar.checkpoint.patches import ParameterView
from gptpar.checkpoint.piece_reader import PieceReader, TensorPiece
from gptpar.checkpoint.pieces import run_parallel
from gptpar.config import ModelConfig
from gptpar.config.stored import StoredModel, stored_model
from gptpar.data.tokenizer import build_tokenizer
from gptpar.errors import CheckpointError, ConfigError, TokenizerError, printable
from gptpar.exchange.checkpoint_tokenizer import tokenizer_of_checkpoint
from gptpar.exchange.files.new_folder import new_folder, why_not_new
from gptpar.exchange.files.safetensors_file import DTYPES as STORED_DTYPES
from gptpar.exchange.files.safetensors_file import SafetensorsWriter, header_of
from gptpar.exchange.hf_folder import CONFIG, INDEX, model_of, shapes_of
from gptpar.exchange.kept import Kept, kept_in
from gptpar.exchange.tokenizer_files import tokenizer_files
from gptpar.model.families import FAMILIES, HfTensor, config_of, differences, tensors_of
from gptpar.system.files import read_regular, write_synced

GENERATION_CONFIG = "generation_config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportOptions:
    """The form in which a model is written.

    Attributes:
        dtype: the weights' dtype; ``None``: that of the import from Hugging Face, else the run's number format.
        max_shard_bytes: largest size of a weight file; ``None``: the files of the import, else 5 GB.
        given_tokenizer: fields of :class:`TokenizerConfig` that replace the checkpoint's.
        with_tokenizer: whether the tokenizer's files are written.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int | None = None
    given_tokenizer: Mapping[str, Any] = field(default_factory=dict)
    with_tokenizer: bool = True


@dataclass(frozen=True)
class Export:
    """A model that is ready to be written; everything about it has been checked.

    Attributes:
        path: the checkpoint's folder.
        tensors: name, as the weight files spell it -> tensor.
        headers: file name -> header of a weight file.
        texts: file name -> contents of every other file.
    """

    path: Path
    manifest: Manifest
    tensors: Mapping[str, HfTensor]
    headers: Mapping[str, str]
    texts: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in the checkpoint."""
        return sum(entry.nbytes for name, entry in self.manifest.tensors.items() if name.startswith("weights/"))

    def write(self, target: Path) -> None:
        """Write the folder; it appears whole or not at all.

        Memory: no more than the largest parameter takes in the checkpoint, or 64 MiB.

        Raises:
            CheckpointError: the target exists, the disk refuses, or the checkpoint is damaged.
        """
        with new_folder(target) as folder:
            for name, text in self.texts.items():
                write_synced(folder / name, text)
            writers: list[SafetensorsWriter] = []
            try:
                for name, header in self.headers.items():
                    writers.append(SafetensorsWriter(folder / name, header))
                self._write_weights(writers)
                run_parallel([writer.sync for writer in writers])
            finally:
                for writer in writers:
                    writer.close()

    def _write_weights(self, writers: Sequence[SafetensorsWriter]) -> None:
        """Write parameter by parameter, in the order of the files, so that few blocks are begun at a time."""
        parameters: dict[str, list[tuple[str, ParameterView, NewTensor]]] = {}
        for writer in writers:
            for name in sorted(writer.tensors, key=writer.place):
                ours = f"weights/{self.tensors[name].ours}"
                view = ParameterView(self.manifest.tensors[ours].shape, self.tensors[name].view)
                parameters.setdefault(ours, []).append((name, view, writer.new_tensor(name, view)))
        room = Room.within(max((self.manifest.tensors[name].nbytes for name in parameters), default=0))
        assembly = Assembly(room)

        def readings(ours: str) -> list[Reading]:
            return [Reading(list(touched(piece)), partial(give, piece)) for piece in reader.pieces(ours)]

        def touched(piece: TensorPiece) -> Iterator[FileBlock]:
            for _, view, tensor in parameters[piece.name]:
                yield from tensor.touching(view.elements(part for box in piece.boxes for part in view.boxes(box)))

        def give(piece: TensorPiece, blocks: Sequence[FileBlock]) -> None:
            with reader.read(piece) as parts:
                for name, view, tensor in parameters[piece.name]:
                    if here := [block for block in blocks if block.tensor is tensor]:
                        patches = [patch for box, values in parts for patch in view.of_parameter(box, values)]
                        assembly.fill(here, name, patches)

        with PieceReader(self.path, self.manifest, parameters, room.readers) as reader:
            assembly.run(map(readings, parameters))


def prepare_export(path: Path, target: Path, options: ExportOptions = ExportOptions()) -> Export:
    """Check everything about an export of one checkpoint.

    Args:
        path: the checkpoint's folder, ``.../iter_0000010``.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    problems = [problem] if (problem := why_not_new(target)) else []
    manifest = read_manifest(path)
    try:
        exported = _exported(path, manifest)
    except ConfigError as error:
        raise CheckpointError("\n".join([*problems, *error.problems])) from None
    problems += _missing(exported.stored.model, manifest)
    texts: dict[str, bytes] = {}
    try:
        texts |= _texts_beside(exported, options)
    except TokenizerError as error:
        problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    end, before = _ends_of_text(exported, options), _dtype_of(exported.fields, exported.stored.meta)
    dtype = options.dtype or before
    if CONFIG not in texts or dtype != before:
        of_version = "dtype" if "dtype" in exported.fields else "torch_dtype"  # version 5 of transformers, version 4
        dtype_field = {of_version: str(dtype).removeprefix("torch.")}
        texts[CONFIG] = _json({**end, **exported.fields, **dtype_field})
    texts.setdefault(GENERATION_CONFIG, _json({"_from_model_config": True, **end}))
    files = _as_it_came(exported, options) or _files_anew(exported.tensors, dtype, options)
    return Export(path, manifest, files.tensors, files.headers, {**files.index, **texts})


@dataclass(frozen=True)
class _Exported:
    """A checkpoint's model as transformers describes it.

    Attributes:
        fields: the fields of its ``config.json``.
        kept: files of the folder from which the model was imported.
        same: whether the model is still the one that was imported.
    """

    stored: StoredModel
    fields: Mapping[str, Any]
    tensors: Sequence[HfTensor]
    kept: Kept | None
    same: bool

    @property
    def kind(self) -> str:
        return str(self.fields["model_type"])


@dataclass(frozen=True)
class _Files:
    """The weight files to be written; see :class:`Export`."""

    tensors: Mapping[str, HfTensor]
    headers: Mapping[str, str]
    index: Mapping[str, bytes]


def _exported(path: Path, manifest: Manifest) -> _Exported:
    """Read the description of a checkpoint's model, and the files kept beside the checkpoint.

    Raises:
        CheckpointError: something cannot be read.
        ConfigError: no family computes the same as the model.
    """
    stored, kept = stored_model(path, manifest.meta), kept_in(path.parent)
    model = stored.model
    if kept is not None:
        there = model_of(kept.fields)
        same_rows = there.padded_vocab_size == model.padded_vocab_size == model.softmax_vocab_size
        if same_rows and not differences(model, there):
            tensors = tensors_of(kept.fields["model_type"], model, model.padded_vocab_size)
            return _Exported(stored, kept.fields, tensors, kept, same=True)
    rows = model.softmax_vocab_size  # transformers' softmax is over all rows
    fields = config_of(model, rows)
    return _Exported(stored, fields, tensors_of(fields["model_type"], model, rows), kept, same=False)


def _tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the tokenizer in the checkpoint; empty if it has none."""
    identity = meta.get("tokenizer")
    return identity if isinstance(identity, dict) else {}


def _missing(model: ModelConfig, manifest: Manifest) -> list[str]:
    """The weights that the checkpoint lacks, or that have other shapes than its model says."""
    problems = []
    for name, shape in shapes_of(model).items():
        entry = manifest.tensors.get(f"weights/{name}")
        if entry is None:
            problems.append(f"the checkpoint lacks the weight {name!r}")
        elif entry.shape != shape:
            problems.append(f"the weight {name!r} is {list(entry.shape)}, and {list(shape)} in the model of its meta")
    return problems


def _as_it_came(exported: _Exported, options: ExportOptions) -> _Files | None:
    """The files that the model came in, if these are to be written again; files of older versions lack a prefix.

    Raises:
        CheckpointError: what is kept of them is damaged.
    """
    kept = exported.kept
    if kept is None or not exported.same or options.dtype is not None or options.max_shard_bytes is not None:
        return None
    base = FAMILIES[exported.kind].names.base
    by_name = {name: one for one in exported.tensors for name in (one.name.removeprefix(base), one.name)}
    stored = kept.tensors
    if len(stored) != len(exported.tensors) or not by_name.keys() >= stored.keys():
        return None
    for name, one in stored.items():
        if one.dtype not in STORED_DTYPES or one.shape != by_name[name].shape:
            described = f"{one.dtype} of {list(one.shape)}, and {list(by_name[name].shape)} in the model"
            raise kept.damaged(f"{printable(name)} is {described}")
    return _Files({name: by_name[name] for name in stored}, kept.headers, kept.index())


def _files_anew(tensors: Sequence[HfTensor], dtype: torch.dtype, options: ExportOptions) -> _Files:
    """The files that transformers would write."""
    by_name = {one.name: one for one in tensors}
    sizes = {name: prod(one.shape) * dtype.itemsize for name, one in by_name.items()}
    shards = shards_of(sizes, options.max_shard_bytes or MAX_SHARD_BYTES)
    headers = {file: header_of({one: (dtype, by_name[one].shape) for one in names}) for file, names in shards.items()}
    if len(shards) == 1:
        return _Files(by_name, headers, {})
    size = sum(sizes.values())
    counts = {"total_parameters": size // dtype.itemsize, "total_size": size}
    places = {name: file for file, names in shards.items() for name in names}
    return _Files(by_name, headers, {INDEX: _json({"metadata": counts, "weight_map": dict(sorted(places.items()))})})


def _dtype_of(fields: Mapping[str, Any], meta: Mapping[str, Any]) -> torch.dtype:
    """The number format in which weights are written unless an option gives another."""
    named = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if named in by_name:
        return by_name[named]
    config = meta.get("config")
    precision = config.get("precision") if isinstance(config, dict) else None
    chosen = [name for name in DTYPES if isinstance(precision, dict) and precision.get(name) is True]
    return DTYPES[chosen[0]] if chosen else torch.float32


def _texts_beside(exported: _Exported, options: ExportOptions) -> dict[str, bytes]:
    """The tokenizer's files, and the kept files of the import.

    Raises:
        TokenizerError: a file is not where it was in training, or is another one.
    """
    of_the_model, kept = (CONFIG, GENERATION_CONFIG), exported.kept
    before = {path.name: read_regular(path) for path in kept.files()} if kept else {}
    texts = {name: text for name, text in before.items() if name in of_the_model and exported.same}
    if not options.with_tokenizer:
        return texts
    if not options.given_tokenizer and kept and kept.has_tokenizer(_tokenizer(exported.stored.meta)):
        return texts | {name: text for name, text in before.items() if name not in of_the_model}
    tokenizer = tokenizer_of_checkpoint(exported.stored, options.given_tokenizer, for_export=True)
    return texts | tokenizer_files(tokenizer, exported.stored.model.max_position_embeddings)


def _ends_of_text(exported: _Exported, options: ExportOptions) -> dict[str, int | None]:
    """The tokens that begin and end documents; ``None`` without, because version 4 would put its own default."""
    eod = _tokenizer(exported.stored.meta).get("eod")
    if type(eod) is not int:
        return {"bos_token_id": None, "eos_token_id": None}
    begin = eod
    with suppress(ConfigError, TokenizerError, ImportError):  # reported where its files are to be written
        config = tokenizer_of_checkpoint(exported.stored, options.given_tokenizer)
        if config.tokenizer_type is not None:
            begin = build_tokenizer(config.tokenizer_type, **config.options).encode_document("")[0]
    return {"bos_token_id": begin, "eos_token_id": eod}


def shards_of(
    sizes: Mapping[str, int], max_bytes: float, stem: str = "model", ending: str = "safetensors"
) -> dict[str, list[str]]:
    """Names of tensors by weight file, which has transformers' name.

    A file has one tensor, and further ones while it stays within ``max_bytes``.

    Args:
        sizes: a tensor's name -> its bytes.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if (count := len(shards)) == 1:
        return {f"{stem}.{ending}": shards[0]}
    return {f"{stem}-{number:05d}-of-{count:05d}.{ending}": shard for number, shard in enumerate(shards, 1)}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
