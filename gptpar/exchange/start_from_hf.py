"""``--load-hf``: a run that begins with the model, weights and tokenizer of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from gptpar.config import ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.fields import Derived, as_word, flag_name
from gptpar.config.flags import ParsedFlags, keys_of_model
from gptpar.config.sections.positions import STRETCHING
from gptpar.errors import CheckpointError
from gptpar.exchange.foreign import ForeignReader, foreign_checkpoint, holds_ours
from gptpar.exchange.hf_folder import open_hf, read_config
from gptpar.exchange.hf_import import fill_from_hf, tokenizer_in
from gptpar.exchange.kept import files_to_keep, keep
from gptpar.exchange.upcycling import upcycled, with_experts
from gptpar.model.families import flags_of
from gptpar.topology.tensor_parts import TensorParts

OF_TRAINING = frozenset(
    {
        *("seq_length", "attention_dropout", "hidden_dropout", "init_method_std", "z_loss_weight"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_expert_capacity_factor", "moe_token_drop_policy"),
    }
)
"""Fields of a model that a run may set to other values than those of the ``config.json``."""

SPELLINGS = {
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "add_position_embedding": ("position_embedding_type", "none"),
    "use_rope_scaling": ("rope_scaling_type", "llama3"),
    "squared_relu": ("mlp_activation", "squared_relu"),
    "quick_geglu": ("mlp_activation", "quick_geglu"),
}
"""Field of a switch -> the field for which it stands, and the value."""


def take_model_of_hf(parsed: ParsedFlags, folder: str) -> None:
    """Fill the model's flags, and the tokenizer's if none is given, from ``--load-hf``; note contradictions."""
    try:
        model = open_hf(Path(folder))
        files_to_keep(Path(folder))
    except CheckpointError as error:
        _note_unread(parsed, Path(folder), error)
        return
    _take_shape(parsed, model.kind, flags_of(model.fields), folder)
    tokenizer = parsed.flags.tokenizer
    if tokenizer.tokenizer_type is None and tokenizer.vocab_size is None:
        found = tokenizer_in(Path(folder)) or TokenizerConfig(vocab_size=model.model.padded_vocab_size)
        parsed.flags = dataclasses.replace(parsed.flags, tokenizer=found)
        parsed.derived.append(Derived("tokenizer", found.tokenizer_type or "none", f"--load-hf {folder}"))


def take_shape_of_hf(parsed: ParsedFlags, folder: str) -> None:
    """Take the model's shape from ``config.json``, for a verb that reads neither weights nor text and begins no run."""
    try:
        fields = read_config(Path(folder))
    except CheckpointError as error:
        _note_unread(parsed, Path(folder), error)
        return
    theirs = flags_of(fields)
    _take_shape(parsed, str(fields["model_type"]), theirs, folder)
    parsed.flags = parsed.flags.update("checkpoint", load_hf=None, moe_use_upcycling=False)
    parsed.flags = parsed.flags.update("model", make_vocab_size_divisible_by=1)  # it has the rows that it has
    tokenizer = parsed.flags.tokenizer
    if tokenizer.tokenizer_type is None and tokenizer.vocab_size is None:
        parsed.flags = parsed.flags.update("tokenizer", vocab_size=theirs.padded_vocab_size)


def _note_unread(parsed: ParsedFlags, folder: Path, error: CheckpointError) -> None:
    """Say why a folder gives no model; the flags that it was to give need not be asked for."""
    found = foreign_checkpoint(folder)
    if holds_ours(folder):
        problem = f"--load-hf {folder} holds checkpoints of gptpar: give --load {folder}."
    elif found and found.reader is ForeignReader.MEGATRON:
        then = f"gptpar convert {folder} NEW_FOLDER makes one of gptpar, for --load NEW_FOLDER"
        problem = f"--load-hf {folder} holds {found}: {then}."
    elif found and found.inside:
        problem = f"--load-hf {folder} holds {found}: give --load-hf {folder / found.inside}."
    else:
        problem = f"--load-hf: {error}"
    parsed.problems.append(problem)
    parsed.refused |= keys_of_model()


def _take_shape(parsed: ParsedFlags, kind: str, theirs: ModelFlags, folder: str) -> None:
    """Fill the model's flags, but for what a run may set otherwise and does; note what conflicts."""
    if parsed.flags.checkpoint.moe_use_upcycling:
        theirs = with_experts(parsed, theirs)
    parsed.problems += _conflicts(parsed, theirs)
    too_long = list(_too_long(parsed, theirs))
    parsed.problems += too_long
    typed = {name for name in OF_TRAINING | STRETCHING if f"model.{name}" in parsed.given}
    typed -= {"seq_length"} if too_long else set()  # the same is not reported again with another remedy
    names = (spec.name for spec in dataclasses.fields(ModelFlags) if spec.name not in typed)
    given = parsed.flags.model
    parsed.flags = parsed.flags.update("model", **{name: getattr(theirs, name) for name in names})
    if theirs.position_embedding_type != "learned_absolute":  # nothing is stored for a position
        parsed.flags = parsed.flags.update("model", max_position_embeddings=None)
    parsed.derived.append(Derived("model", kind, f"--load-hf {folder}"))
    for name in sorted(typed & STRETCHING):
        if (value := getattr(given, name)) != (there := getattr(theirs, name)):
            was = "it has none there" if there is None else f"it is {as_word(there)} there"
            parsed.derived.append(Derived(name.replace("_", " "), value, f"{flag_name(name)}; {was}"))


def _too_long(parsed: ParsedFlags, theirs: ModelFlags) -> Iterator[str]:
    """A sentence if ``--seq-length`` goes past the model's positions, and no flag stretches these."""
    length, positions = parsed.flags.model.seq_length, theirs.max_position_embeddings
    if "model.seq_length" not in parsed.given or not length or not positions or length <= positions:
        return
    remedy = f"use at most {positions}"
    if theirs.position_embedding_type != "learned_absolute":  # nothing is stored for a position
        if any(f"model.{name}" in parsed.given for name in STRETCHING):
            return
        remedy += (
            f", or stretch them, such as by --rope-scaling-type yarn --rope-scaling-factor {-(-length // positions)} "
            f"--original-max-position-embeddings {positions}, or by a larger --rotary-base"
        )
    yield f"--seq-length {length} goes past the {positions} positions of the model of --load-hf: {remedy}."


def _conflicts(parsed: ParsedFlags, theirs: ModelFlags) -> Iterator[str]:
    """A sentence for each flag of the model that contradicts the ``config.json``."""
    for name in sorted(parsed.given):
        section, _, field = name.partition(".")
        if section != "model" or field in OF_TRAINING | STRETCHING or not hasattr(theirs, field):
            continue
        here, there = getattr(parsed.flags.model, field), getattr(theirs, field)
        if field == "preset":
            yield "--preset says another model's shape than --load-hf: leave one of them out."
        elif field == "make_vocab_size_divisible_by":
            if here != there and (rows := theirs.padded_vocab_size or 0) % here:
                yield f"{flag_name(field)} is {here}, and the model of --load-hf has {rows:,} rows: leave the flag out."
        elif here != there and field in SPELLINGS:
            real, meant = SPELLINGS[field]
            if (value := getattr(theirs, real)) != meant:
                yield f"{flag_name(real)} is {meant} here, and the model of --load-hf has {value}: leave the flag out."
        elif here != there:
            yield f"{flag_name(field)} is {here}, and the model of --load-hf has {there}: leave the flag out."


def start_from_hf(
    folder: Path, weights: Mapping[str, TensorParts], kept_with: Path | None, mixture: ModelConfig | None = None
) -> str:
    """Give a new run a Hugging Face model's weights; every process calls it and reads the parameters that it holds.

    Args:
        weights: our global name -> weight.
        kept_with: the folder of checkpoints beside which this process keeps the model's other files.
        mixture: the model of the run, if the folder's is dense and its MLPs become experts.

    Returns:
        The model's kind.

    Raises:
        CheckpointError: the folder has changed since the command line was read.
    """
    model = open_hf(folder)
    fill_from_hf(model if mixture is None else upcycled(model, mixture), weights)
    if kept_with is not None:
        keep(model, kept_with)
    return model.kind
