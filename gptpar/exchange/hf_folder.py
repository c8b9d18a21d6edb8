"""Opens and checks a Hugging Face folder: its configuration, and where its weights are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.data_file import AlignedBuffers
from gptpar.checkpoint.patches import ParameterView
from gptpar.config import Flags, ModelConfig, TokenizerConfig
from gptpar.config.sections.model import check_model, complete_model
from gptpar.config.validate import range_problems
from gptpar.errors import CheckpointError, ConfigError, printable
from gptpar.exchange.files.mxfp4 import with_mxfp4
from gptpar.exchange.files.safetensors_file import DTYPES
from gptpar.exchange.files.weight_files import WeightFile, open_all
from gptpar.exchange.foreign_model import MAX_LISTED
from gptpar.model.families import FAMILIES, HfTensor, flags_of, tensors_of
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import build_on_meta
from gptpar.system.files import read_regular

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OLD_WEIGHTS, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""Pickles, which are read where there are no safetensors files."""

MAX_JSON_BYTES = 64 << 20

NO_WEIGHT = re.compile(r".*\.(attn|attention)\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq|.*\.position_ids")
"""Buffers that older versions of transformers saved beside the weights; they follow from the configuration."""

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Source:
    """The file of a tensor, and its name there."""

    file: WeightFile
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.file.tensors[self.name].dtype]


@dataclass(frozen=True)
class SourcePart:
    """Elements of one of transformers' tensors.

    Attributes:
        ours: name of our parameter.
        theirs: transformers' name.
        start, stop: number of the first element, and of the one after the last.
    """

    ours: str
    theirs: str
    source: Source
    start: int
    stop: int

    def read(self, buffers: AlignedBuffers, *, past_cache: bool) -> AbstractContextManager[torch.Tensor]:
        """The elements; these are in memory until the block of the ``with`` statement ends.

        Args:
            buffers: one for each thread that reads.
            past_cache: see :class:`~gptpar.checkpoint.data_file.SourceFile`.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        return self.source.file.part(self.source.name, self.start, self.stop, buffers, past_cache=past_cache)


@dataclass(frozen=True)
class HfModel:
    """A model whose folder has been checked: every tensor is there and has the right shape.

    Attributes:
        kind: its ``model_type``.
        fields: the fields of its ``config.json``.
        parameters: our global name -> transformers' tensors that make up the parameter, each with its source; all of
            the model's but those that keep their initial values.
    """

    folder: Path
    kind: str
    fields: Mapping[str, Any]
    model: ModelConfig
    parameters: Mapping[str, list[tuple[HfTensor, Source]]]

    def dtype(self, name: str) -> torch.dtype:
        """The number format of one of our parameters: fp32, or fp64 if a tensor of it is fp64."""
        wide = any(source.dtype == torch.float64 for _, source in self.parameters[name])
        return torch.float64 if wide else torch.float32

    def views(self, name: str, shape: tuple[int, ...]) -> dict[str, ParameterView]:
        """The place of each of transformers' tensors, by its name, in one of our parameters."""
        return {tensor.name: ParameterView(shape, tensor.view) for tensor, _ in self.parameters[name]}

    def parts(self, name: str) -> list[SourcePart]:
        """The parts of the folder's files that hold one of our parameters, in reading order."""
        return [
            SourcePart(name, tensor.name, source, start, stop)
            for tensor, source in self.parameters[name]
            for start, stop in pairwise([*source.file.part_starts(source.name), prod(tensor.shape)])
        ]


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The global shape of each parameter of a model."""
    return {
        f"{spec.name}.{name}": tuple(parameter.shape)
        for spec in gpt_model(model).specs
        for name, parameter in build_on_meta(spec).named_parameters()
    }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a stranger's file.

    Raises:
        CheckpointError: the file holds none, or is too large.
    """
    try:
        fields = json.loads(read_regular(path, MAX_JSON_BYTES))
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what transformers writes: {printable(str(error)[:200])}") from None
    return fields


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """The model that a ``config.json`` describes.

    Raises:
        ConfigError: with all reasons why gptpar cannot compute the same as that model.
    """
    problems = []
    for name in ("num_hidden_layers", "n_layer"):
        layers = fields.get(name)
        if layers is not None and (type(layers) is not int or not 1 <= layers <= MAX_LAYERS):
            problems.append(f"{CONFIG} says {printable(str(layers)[:80])} layers; there can be 1 to {MAX_LAYERS:,}.")
            fields = {**fields, name: 1}  # so that all other problems are reported, too
    try:
        flags = Flags(model=flags_of(fields))
        problems += [f"{CONFIG}: {problem}" for problem in (*range_problems(flags), *check_model(flags))]
        if not problems:
            return complete_model(flags.model, TokenizerConfig())
    except ConfigError as error:
        problems += error.problems
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        problems.append(f"{CONFIG} has a value of a wrong kind: {printable(str(error)[:200])}.")
    raise ConfigError(problems)


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's ``config.json``, whose model gptpar can compute; no weights need be there.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    try:
        fields = read_json(folder / CONFIG)
        model_of(fields)
    except ConfigError as error:
        raise CheckpointError(f"{folder} holds no model that gptpar knows:\n" + "\n".join(error.problems)) from None
    return fields


def open_hf(folder: Path) -> HfModel:
    """Open a folder with ``config.json`` and files of weights; no tensor is read yet.

    Raises:
        CheckpointError: with all problems.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give one with {CONFIG} and {WEIGHTS}")
    problems: list[str] = []
    fields, model, files = None, None, {}
    try:
        fields = read_json(folder / CONFIG)
        model = model_of(fields)
    except ConfigError as error:
        problems += error.problems
    except CheckpointError as error:
        problems.append(str(error))
    try:
        files = open_all(_weight_files(folder))
        if is_packed(fields or {}):
            files = with_mxfp4(files)
    except CheckpointError as error:
        problems += [str(error), "copy or download these files again, and the others from the same place"]
    if problems or fields is None or model is None:
        raise CheckpointError(f"{folder} cannot be read as a Hugging Face model:\n" + "\n".join(problems))
    kind = fields["model_type"]
    found = _matched(kind, model, files, packed=is_packed(fields))
    if problems := list(_mismatches(kind, model, found, files)) or list(_untied_head(kind, model, files)):
        lines = [*problems[:MAX_LISTED], *([f"and {len(problems) - MAX_LISTED} more"] * (len(problems) > MAX_LISTED))]
        lines.append(_remedy(kind, found))
        raise CheckpointError(f"the weights in {folder} are not those of its {CONFIG}:\n" + "\n".join(lines))
    parameters: dict[str, list[tuple[HfTensor, Source]]] = {}
    for tensor, source in found:
        assert source is not None
        parameters.setdefault(tensor.ours, []).append((tensor, source))
    return HfModel(folder, kind, fields, model, parameters)


def _remedy(kind: str, found: list[tuple[HfTensor, Source | None]]) -> str:
    """The remedy where weights and configuration differ."""
    lacking = {tensor.name for tensor, source in found if source is None}
    if lacking == {f"{FAMILIES[kind].names.outer['output']}.weight"}:
        return (
            "without an LM head of its own a model has tied embeddings: if it was trained so, set tie_word_embeddings "
            f"to true in a copy of its {CONFIG}"
        )
    return f"take {CONFIG} and all weight files from the same model"


def _untied_head(kind: str, model: ModelConfig, files: Mapping[str, WeightFile]) -> Iterator[str]:
    """A sentence if embeddings are said to be tied, and the files have an LM head with other values."""
    head, rows = (f"{FAMILIES[kind].names.outer[end]}.weight" for end in ("output", "embedding"))
    rows = rows if rows in files else rows.removeprefix(FAMILIES[kind].names.base)
    if not model.tied or head not in files or rows not in files:
        return
    stored, other, buffers = files[rows].tensors[rows], files[head].tensors[head], AlignedBuffers(2)
    same, size = (stored.shape, stored.dtype) == (other.shape, other.dtype), 2**20
    for start in range(0, prod(stored.shape) if same else 0, size):
        stop = min(prod(stored.shape), start + size)
        with (
            files[head].part(head, start, stop, buffers, past_cache=False) as ours,
            files[rows].part(rows, start, stop, buffers, past_cache=False) as theirs,
        ):
            if not (same := torch.equal(ours, theirs)):
                break
    if not same:
        yield (
            f"{CONFIG} says tie_word_embeddings, and {head!r} has another shape, format or values than {rows!r}: set "
            "it to false in a copy of the folder, or take the tensor out"
        )


def _weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights; safetensors go before pickles.

    Raises:
        CheckpointError: there are none, or the index names something that is not a file of the folder.
    """
    for whole, index, suffix in ((WEIGHTS, INDEX, "safetensors"), (OLD_WEIGHTS, OLD_INDEX, "bin")):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return _files_of_index(folder / index, suffix)
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}, {OLD_WEIGHTS} nor {OLD_INDEX}")


def _files_of_index(index: Path, suffix: str) -> list[Path]:
    places = read_json(index).get("weight_map")
    named = list(places.values()) if isinstance(places, dict) else []
    if not named or not all(isinstance(name, str) and is_weight_file(name, suffix) for name in named):
        raise CheckpointError(f"{index} does not say which files of this folder have the weights")
    return [index.parent / name for name in sorted(set(named))]


def is_weight_file(name: str, suffix: str = "safetensors") -> bool:
    """Whether a stranger's name is that of a weight file in the folder itself."""
    return re.fullmatch(rf"[\w.-]+\.{suffix}", name) is not None


def is_packed(fields: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` says that weights are stored in fewer bits than their format has."""
    return bool(fields.get("quantization_config"))


def _matched(
    kind: str, model: ModelConfig, files: Mapping[str, WeightFile], *, packed: bool
) -> list[tuple[HfTensor, Source | None]]:
    """Each tensor that the model needs, and where it is; older files lack the base model's prefix in all names."""
    base = FAMILIES[kind].names.base
    found: list[tuple[HfTensor, Source | None]] = []
    for tensor in tensors_of(kind, model, model.padded_vocab_size, packed=packed):
        spellings = (tensor.name, tensor.name.removeprefix(base))
        name = next((name for name in spellings if name in files), None)
        found.append((tensor, None if name is None else Source(files[name], name)))
    return found


def _mismatches(
    kind: str, model: ModelConfig, found: list[tuple[HfTensor, Source | None]], files: Mapping[str, WeightFile]
) -> Iterator[str]:
    for tensor, source in found:
        if source is None:
            yield f"tensor {tensor.name!r} is missing"
            continue
        stored = source.file.tensors[source.name]
        if stored.shape != tensor.shape:
            yield f"tensor {tensor.name!r} is {list(stored.shape)}, and {list(tensor.shape)} follows from {CONFIG}"
        if stored.dtype not in DTYPES:
            yield f"tensor {tensor.name!r} is {stored.dtype}; weights are read in {', '.join(DTYPES)}"
    head = f"{FAMILIES[kind].names.outer['output']}.weight"
    used = {source.name for _, source in found if source is not None} | ({head} if model.tied else set())
    for name in sorted(files.keys() - used):
        if not NO_WEIGHT.fullmatch(name):
            yield (
                f"tensor {printable(name[:80])!r} is not a weight of gptpar's {kind} model: take the file of the same "
                "model, or remove the tensor"
            )
