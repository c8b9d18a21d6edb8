"""Makes the meta (run description) of a converted checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gptpar.config import ModelConfig, TokenizerConfig

CONVERTED = "converted"
"""The type of a tokenizer of which a checkpoint knows the number of ids at most."""


def converted_meta(
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    source: str,
    *,
    vocab_size: int | None,
    sha256: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The meta of a converted checkpoint: enough to make text, to export, and to begin a run with --finetune.

    Args:
        source: the program that it comes from.
        vocab_size: token ids that it has, if they are known.
        sha256: of the tokenizer's files, as ``digests_of`` gives them.
    """
    known: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    known |= {"sha256": dict(sha256)} if sha256 else {}
    return {
        "config": {"model": dataclasses.asdict(model), "tokenizer": dataclasses.asdict(tokenizer)},
        "tokenizer": {"type": CONVERTED, **known},
        "converted_from": source,
    }
