"""Flags of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptpar.config.fields import flag
from gptpar.system.data_flags import TIKTOKEN, TOKENIZER_FILES, TOKENIZER_TYPES


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data set (its vocabulary sizes the model)."""

    tokenizer_type: str | None = flag(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = flag(
        None,
        TOKENIZER_FILES["tokenizer_model"],
        names=("--tokenizer-name-or-path", "--tokenizer-path", "--tokenizer-file"),
    )
    vocab_file: str | None = flag(None, TOKENIZER_FILES["vocab_file"])
    merge_file: str | None = flag(None, TOKENIZER_FILES["merge_file"])
    vocab_size: int | None = flag(None, "number of token ids, where no tokenizer says it", least=1)
    tiktoken_pattern: str | None = flag(None, TIKTOKEN["tiktoken_pattern"], choices=("v1", "v2"))
    tiktoken_num_special_tokens: int | None = flag(None, TIKTOKEN["tiktoken_num_special_tokens"], least=1)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a tokenizer, beside its type."""
        names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")
        of_tiktoken = ("tiktoken_pattern", "tiktoken_num_special_tokens")
        return {name: getattr(self, name) for name in (*names, *of_tiktoken)}
