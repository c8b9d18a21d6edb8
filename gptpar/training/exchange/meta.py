"""The meta of a converted checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from gptpar.config import ModelConfig, TokenizerConfig


def converted_meta(model: ModelConfig, tokenizer: TokenizerConfig, source: str) -> dict[str, Any]:
    """The meta of a checkpoint of iteration 0: enough to make text, to export, and to begin a run with --finetune.

    Args:
        source: the program that it comes from.
    """
    return {
        "config": {"model": dataclasses.asdict(model), "tokenizer": dataclasses.asdict(tokenizer)},
        "tokenizer": {"type": "converted", "vocab_size": tokenizer.vocab_size or model.padded_vocab_size},
        "converted_from": source,
    }
