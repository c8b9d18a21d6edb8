"""Megatron-LM's TikTokenizer: a byte-level BPE run by tiktoken, whose first ids are special tokens.

The model's file is a JSON list of tokens in the order of the merges. Each entry has its ``rank`` and its bytes in
base64 (``token_bytes``). The first 256 tokens are the single bytes. A token's id is its rank plus the number of special
tokens. Source: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any

from gptpar.data.tokenizer.base import Tokenizer, joined, utf8
from gptpar.errors import TokenizerError

NUM_IDS, NUM_SPECIAL = 1 << 17, 1000
"""Megatron's defaults of ``--vocab-size`` and ``--tiktoken-num-special-tokens``."""
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""The first special tokens; the others are ``<SPECIAL_7>`` and so on."""
BOS, EOD = "<s>", "</s>"

_BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = (rf"[{first}\p{{Lm}}\p{{Lo}}\p{{M}}]" for first in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BLANKS = (r"\s+(?!\S)", r"\s+")
PATTERNS = {
    "v1": (rf"{_BEFORE_LETTERS}?+\p{{L}}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", *_BLANKS),
    "v2": (
        *(rf"{_BEFORE_LETTERS}?{_UPPER}*{_LOWER}+", rf"{_BEFORE_LETTERS}?{_UPPER}+{_LOWER}*"),
        *(r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", *_BLANKS),
    ),
}
"""``--tiktoken-pattern`` -> regular expressions that split text before merging, in their order as alternatives."""


class TikTokenizer(Tokenizer):
    """The ids of Megatron-LM's tokenizer of this name; ``eod`` is the id of "</s>".

    A special token that is written in a text is encoded as ordinary characters. Megatron-LM would give its id instead.

    Args:
        vocab_size: number of ids, special tokens included. Further tokens of the file are not used.
    """

    name = "TikTokenizer"
    options = ("tokenizer_model",)
    file_names = {"tokenizer_model": "tiktoken.json"}
    optional = ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")

    def __init__(
        self,
        tokenizer_model: str,
        vocab_size: int = NUM_IDS,
        tiktoken_pattern: str = "v2",
        tiktoken_num_special_tokens: int = NUM_SPECIAL,
    ):
        import tiktoken

        super().__init__()
        self._pattern, self._num_special = tiktoken_pattern, tiktoken_num_special_tokens
        if not len(SPECIAL) <= self._num_special < vocab_size - 256:
            raise TokenizerError(
                f"--tiktoken-num-special-tokens {self._num_special} must be at least {len(SPECIAL)}, and leave 256 "
                f"bytes of --vocab-size {vocab_size:,}"
            )
        tokens = _parse(self._read("tokenizer_model", tokenizer_model), tokenizer_model)
        number = vocab_size - self._num_special
        if len(tokens) < number:
            raise TokenizerError(
                f"{tokenizer_model} has {len(tokens):,} tokens, and --vocab-size {vocab_size:,} with "
                f"{self._num_special:,} special ones needs {number:,}: give --vocab-size "
                f"{len(tokens) + self._num_special}"
            )
        ranks = {token: self._num_special + rank for rank, token in enumerate(tokens[:number])}
        self.vocab_size, self.bos, self.eod = vocab_size, SPECIAL.index(BOS), SPECIAL.index(EOD)
        self._encoding = tiktoken.Encoding(
            self.name, pat_str="|".join(PATTERNS[self._pattern]), mergeable_ranks=ranks, special_tokens={}
        )
        others = (f"<SPECIAL_{number}>" for number in range(len(SPECIAL), self._num_special))
        self._bytes = [*(name.encode() for name in (*SPECIAL, *others)), *ranks]

    def encode(self, text: str) -> list[int]:
        utf8(text)  # raises for text that tiktoken would replace with U+FFFD silently
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return joined(ids, self._bytes)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "pattern": self._pattern, "num_special_tokens": self._num_special}


def _parse(content: bytes, path: str) -> list[bytes]:
    """The tokens' bytes by rank.

    Raises:
        TokenizerError: the file is not a list of tokens in the order of their ranks.
    """
    try:
        entries = json.loads(content)
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        in_order = all(entry["rank"] == rank for rank, entry in enumerate(entries))
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise TokenizerError(
            f'--tokenizer-model {path} is no list of {{"rank": 0, "token_bytes": "AA==", "token_str": ...}} '
            f"({type(error).__name__}: {error})"
        ) from None
    if not in_order or tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens):
        raise TokenizerError(
            f"--tokenizer-model {path}: the ranks must be 0, 1, 2, ..., the first 256 tokens the single bytes, and no "
            "token must come twice"
        )
    return tokens
