"""Flags of corpora and tokenizers, which several commands read alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence

TOKENIZERS = {
    "GPT2BPETokenizer": "GPT2BPETokenizer",
    "SentencePieceTokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "Llama2Tokenizer",
    "HFTokenizer": "HFTokenizer",
    "PretrainedFromHF": "HFTokenizer",
    "HuggingFaceTokenizer": "HFTokenizer",
    "TikTokenizer": "TikTokenizer",
    "NullTokenizer": "NullTokenizer",
    "ByteLevelTokenizer": "ByteLevelTokenizer",
}
"""``--tokenizer-type`` -> the class that it names. The names are Megatron-LM's; some classes have two."""

TOKENIZER_TYPES = tuple(TOKENIZERS)

TOKENIZER_FILES = {
    "vocab_file": "encoder.json of GPT2BPETokenizer",
    "merge_file": "vocab.bpe of GPT2BPETokenizer",
    "tokenizer_model": (
        ".model file of a SentencePieceTokenizer or a Llama2Tokenizer, tokenizer.json of an HFTokenizer, or the folder "
        "that holds it; .json file of a TikTokenizer"
    ),
}
"""Flag of a tokenizer's file, underscored -> its help."""

TIKTOKEN = {
    "tiktoken_pattern": "how a TikTokenizer cuts text before merging: v1 or v2 (default: v2)",
    "tiktoken_num_special_tokens": "ids of a TikTokenizer that are special tokens (default: 1000)",
}
"""Further flag of a TikTokenizer, underscored -> its help."""


def split_weights(entries: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of a ``--data-path`` list; weights are ``None`` if the list has none.

    An even number of entries whose first, third, ... are numbers is a list of WEIGHT PREFIX pairs; anything else is a
    list of prefixes.
    """
    if len(entries) % 2:
        return list(entries), None
    try:
        weights = [float(entry) for entry in entries[::2]]
    except ValueError:
        return list(entries), None
    return list(entries[1::2]), weights
