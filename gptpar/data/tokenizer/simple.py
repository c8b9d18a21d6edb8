"""Tokenizers that need no files: one for text that consists of token ids, one for raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gptpar.data.tokenizer.base import Tokenizer, joined, utf8
from gptpar.errors import TokenizerError


class NullTokenizer(Tokenizer):
    """Text is token ids separated by white space.

    As in Megatron-LM, ``--vocab-size N`` counts the ids 0..N-1 of the data; ``eod`` is N and ``vocab_size`` is N + 1.
    """

    name = "NullTokenizer"
    options = ("vocab_size",)

    def __init__(self, vocab_size: int):
        super().__init__()
        if vocab_size < 1:
            raise TokenizerError(f"NullTokenizer needs a vocabulary of at least 1 id, not --vocab-size {vocab_size}")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"NullTokenizer reads token ids separated by white space: {error}") from error
        bad = next((i for i in ids if not 0 <= i < self.eod), None)
        if bad is not None:
            raise TokenizerError(f"token id {bad} is outside 0..{self.eod - 1}, the ids of --vocab-size {self.eod}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


_BYTES = [*(bytes([byte]) for byte in range(256)), b""]


class ByteLevelTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of the text's UTF-8; 256 ends a document and decodes to nothing."""

    name = "ByteLevelTokenizer"
    options = ()

    vocab_size = 257
    eod = 256

    @property
    def cutter(self) -> Callable[[bytes], int] | None:
        return _last_character

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        return joined(ids, _BYTES)


def _last_character(data: bytes) -> int:
    """Position at which the last character of UTF-8 begins."""
    at = len(data) - 1
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 0)
