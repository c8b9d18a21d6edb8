"""What a tokenizer is, and what all of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gptpar.errors import TokenizerError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        name: canonical name of the tokenizer type.
        vocab_size: number of ids, without padding for tensor parallelism; every id is below it.
        eod: id that ends a document; no text is ever encoded to it.
    """

    name: ClassVar[str]
    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special token added and none recognised in the text.

        Raises:
            TokenizerError: the text cannot be represented.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids whatever: bytes that are not UTF-8 and ids that do not exist become U+FFFD."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON object that is equal for two tokenizers if and only if they give the same ids."""
        ...


class TokenizerBase:
    """Reads model files, remembering what was read so that `identity` describes the bytes in use."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]]  # the arguments of build_tokenizer that this type needs
    vocab_size: int
    eod: int

    def __init__(self) -> None:
        self._sha256: dict[str, str] = {}

    def _read(self, role: str, path: str | Path) -> bytes:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
        self._sha256[role] = hashlib.sha256(content).hexdigest()
        return content

    def identity(self) -> dict[str, Any]:
        return {
            "type": self.name,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "sha256": dict(self._sha256),
        }


def utf8(text: str) -> bytes:
    """The text's bytes; JSON and command lines can hold a lone surrogate, which has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the text has no UTF-8 form: {error}") from None


def decode_known(ids: Iterable[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """Decode runs of existing ids with `decode`; each id that does not exist becomes one U+FFFD."""
    runs = groupby((int(i) for i in ids), lambda i: 0 <= i < vocab_size)
    return "".join(decode(list(run)) if known else REPLACEMENT * len(list(run)) for known, run in runs)
