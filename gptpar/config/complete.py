"""Turns checked flags into a complete ``Config``, and pads the vocabulary. Pure."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any

from gptpar.config import Config, Flags, ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.fields import completed


def padded_vocab(vocab_size: int, multiple: int, rows: int | None = None) -> int:
    """Rows of the embedding: as given, else the vocabulary rounded up to a multiple; never a function of the layout."""
    return -(-vocab_size // multiple) * multiple if rows is None else rows


def softmax_vocab(vocab_size: int, rows: int, *, over_padding: bool) -> int:
    """Rows over which the softmax is."""
    return rows if over_padding else vocab_size


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
    """The model; its vocabulary is that of a checkpoint, or of ``--vocab-size``.

    A checkpoint that says its rows alone has all of them in the softmax: one of another program, or an older one.
    """
    size, stored = tokenizer.vocab_size or 0, flags.padded_vocab_size
    rows = stored or padded_vocab(size, flags.make_vocab_size_divisible_by, flags.pad_vocab_size_to)
    over_padding = flags.softmax_over_padding or stored is not None
    filled = dataclasses.replace(
        flags,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        padded_vocab_size=rows,
        softmax_vocab_size=flags.softmax_vocab_size or softmax_vocab(size, rows, over_padding=over_padding),
        softmax_over_padding=flags.softmax_over_padding if flags.softmax_vocab_size else over_padding,
    )
    return completed(ModelConfig, filled)


@cache
def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)
