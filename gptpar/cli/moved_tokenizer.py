"""Finds the tokenizer that a checkpoint names where its files have been moved since."""

from __future__ import annotations

import argparse

from gptpar.data.tokenizer import Tokenizer
from gptpar.errors import CheckpointError
from gptpar.training.data import tokenizer_of
from gptpar.training.exchange.checkpoint_tokenizer import tokenizer_of_checkpoint
from gptpar.training.stored import StoredModel


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the files are now."""
    parser.add_argument("--tokenizer-model", metavar="FILE", help="where the tokenizer's model is now, if it was moved")
    parser.add_argument("--vocab-file", metavar="FILE", help="where GPT-2 BPE's encoder.json is now, if it was moved")
    parser.add_argument("--merge-file", metavar="FILE", help="where GPT-2 BPE's vocab.bpe is now, if it was moved")


def moved_tokenizer(stored: StoredModel, args: argparse.Namespace) -> Tokenizer:
    """The tokenizer, with files from where the flags say.

    Raises:
        CheckpointError: the model was trained without one.
        TokenizerError: a file is another one than in training, and no flag names it.
    """
    moved = {name: getattr(args, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    tokenizer = tokenizer_of(tokenizer_of_checkpoint(stored, {name: path for name, path in moved.items() if path}))
    if tokenizer is None:
        raise CheckpointError(
            "the model was trained without a tokenizer (--vocab-size alone), so there is no text to make"
        )
    return tokenizer
