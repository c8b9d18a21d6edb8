"""Tokenizers by Megatron-LM's names. A tokenizer's library is imported only when the tokenizer is built."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from gptpar.data.tokenizer.base import Tokenizer, TokenizerBase
from gptpar.data.tokenizer.bpe import GPT2BPETokenizer
from gptpar.data.tokenizer.hf import HFTokenizer, tokenizer_json
from gptpar.data.tokenizer.sentence_piece import Llama2Tokenizer, SentencePieceTokenizer
from gptpar.data.tokenizer.simple import ByteLevelTokenizer, NullTokenizer
from gptpar.errors import ConfigError
from gptpar.system.data_flags import TOKENIZER_FILES, TOKENIZER_TYPES, TOKENIZERS

_LEARNT = (GPT2BPETokenizer, SentencePieceTokenizer, Llama2Tokenizer, HFTokenizer)
_CLASSES: dict[str, type[TokenizerBase]] = {cls.__name__: cls for cls in (*_LEARNT, NullTokenizer, ByteLevelTokenizer)}

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "add_tokenizer_flags", "build_tokenizer", "tokenizer_problems"]


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Build a tokenizer of one of TOKENIZER_TYPES. Arguments that its type does not need are ignored.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES.
        vocab_file, merge_file, tokenizer_model: paths; TOKENIZER_FILES says which type needs which.
        vocab_size: number of ids of the NullTokenizer, without its eod.

    Raises:
        ConfigError: flags or files are missing; it names all of them.
        TokenizerError: a file is not a tokenizer of this type.
    """
    given = {
        "vocab_file": vocab_file,
        "merge_file": merge_file,
        "tokenizer_model": tokenizer_model,
        "vocab_size": vocab_size,
    }
    problems = tokenizer_problems(tokenizer_type, **given)
    if problems:
        raise ConfigError(problems)
    cls = _CLASSES[TOKENIZERS[tokenizer_type]]
    tokenizer: Tokenizer = cls(**{option: given[option] for option in cls.options})  # type: ignore[assignment]
    return tokenizer


def tokenizer_problems(tokenizer_type: str, **given: str | int | None) -> list[str]:
    """A sentence for each flag or file that `build_tokenizer` would miss; reads no file."""
    if tokenizer_type not in TOKENIZERS:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TOKENIZER_TYPES)}"
        return [f"--tokenizer-type {tokenizer_type} does not exist; {hint}"]
    problems = []
    for option in _CLASSES[TOKENIZERS[tokenizer_type]].options:
        flag, value = f"--{option.replace('_', '-')}", given.get(option)
        if value is None:
            problems.append(f"--tokenizer-type {tokenizer_type} needs {flag}")
        elif isinstance(value, str) and not tokenizer_json(value).is_file():
            absent = f"is not there: give the path of a file, seen from {Path.cwd()}"
            problems.append(f"{flag} {value} {'holds no tokenizer.json' if Path(value).is_dir() else absent}")
    return problems


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags whose names, underscored, are the arguments of `build_tokenizer`."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        required=True,
        choices=TOKENIZER_TYPES,
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)}",
    )
    for name, help in TOKENIZER_FILES.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help=help)
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="number of ids of the NullTokenizer, without its eod"
    )
