"""Copies a Hugging Face folder's weights into a checkpoint, or into the parameters of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

from gptpar.checkpoint.assembly import Room
from gptpar.checkpoint.data_file import AlignedBuffers
from gptpar.checkpoint.patches import ParameterView, common_parts
from gptpar.checkpoint.pieces import NUM_THREADS, run_parallel
from gptpar.checkpoint.streamed import StreamedCheckpoint, ViewElements, fill
from gptpar.config import TokenizerConfig
from gptpar.data.tokenizer import files_of
from gptpar.errors import CheckpointError
from gptpar.exchange.checkpoint_tokenizer import digests_of
from gptpar.exchange.foreign_model import Finite, ForeignModel, converted_meta
from gptpar.exchange.hf_folder import HfModel, SourcePart, open_hf, read_json, shapes_of
from gptpar.exchange.kept import files_to_keep, keep
from gptpar.system.strided_copy import copy_elements
from gptpar.topology.tensor_parts import TensorParts


def hf_model(source: Path) -> ForeignModel:
    """Open a Hugging Face folder for the conversion into a checkpoint at iteration 0, parameter by parameter.

    Raises:
        CheckpointError: with all problems.
    """
    model = open_hf(source)
    files_to_keep(source)
    rows = model.model.padded_vocab_size
    tokenizer = tokenizer_in(source) or TokenizerConfig(vocab_size=rows)
    identity = {"vocab_size": tokenizer.vocab_size or rows, "sha256": digests_of(tokenizer)}
    meta = converted_meta(model.model, tokenizer, f"huggingface {model.kind}", **identity)
    files = files_of(tokenizer.tokenizer_type, **tokenizer.options)
    return ForeignModel(meta, partial(_write_weights, model), tokenizer=files, keep=partial(keep, model))


def _write_weights(model: HfModel, file: StreamedCheckpoint) -> None:
    """Write all parameters; memory holds no more than the largest of them, or 64 MiB."""
    shapes = shapes_of(model.model)
    views = {name: model.views(name, shapes[name]) for name in model.parameters}
    new = {name: file.add(f"weights/{name}", shapes[name], model.dtype(name), views[name]) for name in views}
    room = Room.within(max(prod(shapes[name]) * model.dtype(name).itemsize for name in new))
    buffers, finite = AlignedBuffers(room.readers), Finite()

    def source(part: SourcePart) -> ViewElements:
        read = partial(part.read, buffers, past_cache=True)
        return ViewElements(new[part.ours], part.theirs, views[part.ours][part.theirs], part.start, part.stop, read)

    fill((list(map(source, model.parts(name))) for name in new), room, finite.look)
    finite.require(model.folder)


def tokenizer_in(folder: Path) -> TokenizerConfig | None:
    """The tokenizer of a Hugging Face folder, if gptpar can read it.

    Raises:
        CheckpointError: its ``tokenizer_config.json``, which says whether texts begin with bos, cannot be read.
    """
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    if vocab.is_file() and merges.is_file():
        return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    if (folder / "tokenizer.model").is_file():
        settings = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
        kind = "Llama2Tokenizer" if settings.get("add_bos_token") is True else "GPTSentencePieceTokenizer"
        return TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(folder / "tokenizer.model"))
    return None


def fill_from_hf(model: HfModel, weights: Mapping[str, TensorParts]) -> None:
    """Give a run's parameters a Hugging Face model's values; every process reads and fills the parts that it holds.

    Of a mixture these are the experts of this process. Memory holds a piece of 8 MiB for each thread that reads.

    Args:
        weights: our global name -> weight.

    Raises:
        CheckpointError: the Hugging Face model lacks a parameter, has it in another shape, or has values that are not
            finite.
    """
    shapes = shapes_of(model.model)
    problems = [
        f"{name} is {list(parts.shape)} in this run and {list(shapes.get(name, ())) or 'missing'} in {model.folder}"
        for name, parts in weights.items()
        if shapes.get(name) != tuple(parts.shape)
    ]
    if problems:
        raise CheckpointError("\n".join(problems))
    held = [name for name, parts in weights.items() if parts.num_held and name in model.parameters]
    views = {name: model.views(name, shapes[name]) for name in held}

    buffers, finite = AlignedBuffers(NUM_THREADS), Finite()

    def give(part: SourcePart) -> None:
        view = views[part.ours][part.theirs]
        with part.read(buffers, past_cache=False) as values:  # other processes read the same files
            finite.look(part.theirs, part.start, values)
            for offsets, own in weights[part.ours].parts:
                here = view.of_parameter((offsets, tuple(own.shape)), own)
                copy_elements(common_parts(view.of_elements(part.start, values), here))

    wanted = [part for name in held for part in model.parts(name) if _is_held(part, views[name], weights[name])]
    run_parallel([partial(give, part) for part in wanted])
    finite.require(model.folder)


def _is_held(part: SourcePart, views: Mapping[str, ParameterView], held: TensorParts) -> bool:
    """Whether a process may hold elements of a part: maybe true for one that it lacks, never false for one it has."""
    view = views[part.theirs]
    boxes = (box for offsets, own in held.parts for box in view.boxes((offsets, tuple(own.shape))))
    return any(first < part.stop and part.start <= last for first, last in view.elements(boxes))
