"""``Tokenizer``, the base class of all, and what they have in common."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gptpar.errors import TokenizerError
from gptpar.system.files import lies_in, read_regular

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Turns text into token ids and back; hashes of the files that it has read make its ``identity``.

    Attributes:
        name: canonical name of the tokenizer type.
        options, optional: arguments of build_tokenizer that this type needs, and those that it takes beside them.
        in_folder: the name of its file, where a folder is given in its place.
        file_names: argument that is a file's path -> its usual name.
        beside: names of further files that belong to it, where they are beside that one.
        may_drop: whether there may be characters that no token represents.
        vocab_size: number of ids, without padding for tensor parallelism; every id is below it.
        eod: id that ends a document; no text is ever encoded to it.
        bos: id with which a document may begin, where the tokenizer's files name one.
        begins_texts: whether ``encode`` puts ``bos`` before each text.
        unknown: id of text that the vocabulary lacks, where there is one.
        files: name -> contents of the files that the tokenizer is made from: a folder with them is the tokenizer.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    in_folder: ClassVar[str] = ""
    file_names: ClassVar[Mapping[str, str]] = {}
    beside: ClassVar[tuple[str, ...]] = ()
    may_drop: ClassVar[bool] = False
    vocab_size: int
    eod: int
    bos: int | None = None
    begins_texts: ClassVar[bool] = False
    unknown: int | None = None

    def __init__(self) -> None:
        self._sha256: dict[str, str] = {}
        self._drops: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}

    def _read(self, role: str, path: str | Path) -> bytes:
        self.files |= self.files_at(role, Path(path))
        content = self.files[self.file_names[role]]
        self._sha256[role] = hashlib.sha256(content).hexdigest()
        return content

    @classmethod
    def files_at(cls, role: str, path: Path) -> dict[str, bytes]:
        """Usual name -> contents, of a file and of those beside it that belong to it.

        Those beside it are no part of the identity, and no links out of its folder.

        Raises:
            TokenizerError: one cannot be read.
        """
        near = [one for one in map(path.with_name, cls.beside) if one.is_file() and lies_in(one, path.parent)]
        return {one.name: _contents(one) for one in near if one != path} | {cls.file_names[role]: _contents(path)}

    @property
    def threads(self) -> bool:
        """Whether ``encode_batch`` releases Python's lock, so that several threads encode faster than one."""
        return False

    @property
    def cutter(self) -> Callable[[bytes], int] | None:
        """A function that finds where a text may be divided: the ids of both parts, end to end, are the text's ids.

        It takes UTF-8 and returns the last such position, 0 if it finds none. Neither part is empty. A
        position stays valid whatever follows the first character behind it. None: texts cannot be divided.
        """
        return None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens are neither added nor recognised in the text.

        Raises:
            TokenizerError: the text cannot be represented.
        """
        raise NotImplementedError

    def encode_batch(
        self, texts: Sequence[str], after: int | None = None, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts end to end, int64 number of ids of each text).

        Args:
            texts: any number of texts, each encoded by itself.
            after, before: ids to put after and before each text that has ids; they count in the number.

        Raises:
            TokenizerError: a text cannot be represented.
        """
        encoded = [self.encode(text) for text in texts]
        for ids in filter(None, encoded):
            ids[:0] = [] if before is None else [before]
            ids += [] if after is None else [after]
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        tokens = np.empty(int(lengths.sum()), np.int64)
        for end, ids in zip(np.cumsum(lengths), encoded, strict=True):
            tokens[end - len(ids) : end] = ids
        return tokens, lengths

    def encode_document(self, text: str) -> list[int]:
        """Ids of a text behind the one with which documents begin: bos where texts are known to begin with it, or eod.

        Raises:
            TokenizerError: the text cannot be represented.
        """
        return self.encode(text) if self.begins_texts else [self.eod, *self.encode(text)]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue; without a text, those of an empty document.

        Raises:
            TokenizerError: the text cannot be represented.
        """
        return self.encode(text) or self.encode_document(text)

    def dropped(self, texts: Iterable[str]) -> Counter[str]:
        """How often each character that no token represents occurs in texts that can be encoded."""
        found: Counter[str] = Counter()
        for text in texts if self.may_drop else ():
            characters = set(text)
            self._drops |= {one: self._is_dropped(one) for one in characters - self._drops.keys()}
            found.update({one: text.count(one) for one in characters if self._drops[one]})
        return found

    def _is_dropped(self, character: str) -> bool:
        """Whether a text has the same ids without the character; white space may divide words and have no ids."""
        if self.encode(character) != self.encode(""):
            return False
        return not character.isspace() or self.encode(f"a{character}b") == self.encode("ab")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids; bytes that are not UTF-8 and ids that do not exist become U+FFFD."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """A JSON object that is equal for two tokenizers if and only if they have the same type, sizes and files."""
        return {"type": self.name, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": dict(self._sha256)}


def file_at(path: str | Path, in_folder: str) -> Path:
    """The file that a path means, be it the file's or that of the folder that holds it under its usual name."""
    return Path(path) / in_folder if in_folder and Path(path).is_dir() else Path(path)


def _contents(path: str | Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error


def utf8(text: str) -> bytes:
    """The text's bytes.

    Raises:
        TokenizerError: the text has a lone surrogate, as JSON and command lines can; it has no bytes in UTF-8.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the text has no UTF-8 form: {error}") from None


def joined(ids: Iterable[int], bytes_of: Sequence[bytes]) -> str:
    """The text of tokens that are bytes; an id that does not exist becomes U+FFFD.

    Args:
        bytes_of: each id's bytes.
    """
    unknown = REPLACEMENT.encode()
    return b"".join(bytes_of[i] if 0 <= i < len(bytes_of) else unknown for i in ids).decode("utf-8", "replace")


def decode_known(ids: Iterable[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """Decode consecutive existing ids with ``decode``; each id that does not exist becomes one U+FFFD."""
    runs = groupby((int(i) for i in ids), lambda i: 0 <= i < vocab_size)
    return "".join(decode(list(run)) if known else REPLACEMENT * len(list(run)) for known, run in runs)
