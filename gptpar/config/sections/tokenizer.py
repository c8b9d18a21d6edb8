"""The tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptpar.config.fields import flag

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HFTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data set (its vocabulary sizes the model)."""

    tokenizer_type: str | None = flag(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = flag(None, "SentencePiece .model, or a Hugging Face tokenizer.json")
    vocab_file: str | None = flag(None, "GPT-2 BPE's encoder.json")
    merge_file: str | None = flag(None, "GPT-2 BPE's vocab.bpe")
    vocab_size: int | None = flag(None, "number of token ids, where no tokenizer says it", least=1)

    @property
    def options(self) -> dict[str, Any]:
        """What a tokenizer is built from, beside its type."""
        names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")
        return {name: getattr(self, name) for name in names}
