"""The tokenizer of a checkpoint for commands that read or make text, and the flags that name other files."""

from __future__ import annotations

import argparse
from typing import Any

from gptpar.config.stored import StoredModel
from gptpar.data.tokenizer import Tokenizer
from gptpar.errors import CheckpointError
from gptpar.exchange import tokenizer_of_checkpoint
from gptpar.run.data import tokenizer_of
from gptpar.system.data_flags import TOKENIZER_FILES


def add_tokenizer_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of files that are used instead of the checkpoint's own copy."""
    for name, text in TOKENIZER_FILES.items():
        help = f"instead of the checkpoint's own copy: {text}"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help=help)


def given_files(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of :class:`TokenizerConfig` that these flags set."""
    return {name: path for name in TOKENIZER_FILES if (path := getattr(args, name)) is not None}


def given_tokenizer(stored: StoredModel, args: argparse.Namespace) -> Tokenizer:
    """The checkpoint's tokenizer, with the files that the flags name.

    Raises:
        CheckpointError: the model was trained without one.
        TokenizerError: a file is another one than in training, and no flag names it.
    """
    tokenizer = tokenizer_of(tokenizer_of_checkpoint(stored, given_files(args)))
    if tokenizer is None:
        raise CheckpointError(
            "the model was trained without a tokenizer (--vocab-size alone), so there is no text to make"
        )
    return tokenizer
