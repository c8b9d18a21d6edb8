"""Turns checked flags into a complete ``Config``, and pads the vocabulary. Pure."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any, TypeVar

from gptpar.config import Config, Flags, ModelConfig, ModelFlags, TokenizerConfig

T = TypeVar("T")


def padded_vocab(vocab_size: int, multiple: int, rows: int | None = None) -> int:
    """Rows of the embedding: as given, else the vocabulary rounded up to a multiple; never a function of the layout."""
    return -(-vocab_size // multiple) * multiple if rows is None else rows


def complete(flags: Flags) -> Config:
    """The configuration that flags say.

    Args:
        flags: as ``derive`` returns them, without problems.

    Raises:
        TypeError: a field that must be known is open.
    """
    sections: dict[str, Any] = {
        name: completed(kind, getattr(flags, name)) for name, kind in _sections().items() if name != "model"
    }
    return Config(model=complete_model(flags.model, flags.tokenizer), **sections)


def complete_model(flags: ModelFlags, tokenizer: TokenizerConfig) -> ModelConfig:
    """The model; its vocabulary is that of a checkpoint, or of ``--vocab-size``."""
    padded = padded_vocab(tokenizer.vocab_size or 0, flags.make_vocab_size_divisible_by, flags.pad_vocab_size_to)
    filled = dataclasses.replace(
        flags,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        padded_vocab_size=flags.padded_vocab_size or padded,
    )
    return completed(ModelConfig, filled)


def completed(kind: type[T], flags: object) -> T:
    """A complete section: what is open in the flags' section gets the complete one's default.

    Raises:
        TypeError: there is no default.
    """
    if isinstance(flags, kind):
        return flags
    names = (spec.name for spec in dataclasses.fields(typing.cast(Any, kind)))
    known = {name: value for name in names if (value := getattr(flags, name)) is not None}
    return kind(**known)


@cache
def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)
