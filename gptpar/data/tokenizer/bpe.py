"""GPT-2's byte-level BPE from encoder.json and vocab.bpe, run by tiktoken and, for many texts, by a C++ kernel.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and the two
files' format as published with GPT-2: a JSON object {token: id}, and one merge "left right" a line, best
first. Both write a byte as one printable character.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from gptpar.data.tokenizer.base import REPLACEMENT, Tokenizer, joined, utf8
from gptpar.errors import TokenizerError
from gptpar.system import native

END_OF_TEXT = "<|endoftext|>"
MAX_IDS = 10_000_000
"""There is a list with an entry for each id, so that one large id would fill the memory."""

# How GPT-2 divides text before merging; possessive quantifiers find the same pieces without backtracking.
PIECES = "|".join(
    [
        r"'(?:[sdmt]|ll|ve|re)",  # English contractions
        r" ?\p{L}++",
        r" ?\p{N}++",
        r" ?[^\s\p{L}\p{N}]++",
        r"\s++$",
        r"\s+(?!\S)",  # without the last blank, which belongs to the next word
        r"\s",
    ]
)

# Positions where a piece ends whatever follows: before a blank that follows something else, and between letters, digits
# and signs. An apostrophe may begin a contraction, so that no piece ends after one.
_SIGN = rb"[!-&(-/:-@\[-`{-~]"
_BLANK_BEYOND_ASCII = (
    rb"\xc2\x85", rb"\xc2\xa0", rb"\xe1\x9a\x80", rb"\xe2\x80[\x80-\x8a\xa8\xa9\xaf]", rb"\xe2\x81\x9f",
    rb"\xe3\x80\x80",
)  # fmt: skip
_CUT = re.compile(
    b"|".join(
        [
            rb"(?<=[!-~])(?=[\t-\r ])",
            rb"(?<=[\x80-\xff])" + b"".join(rb"(?<!%b)" % blank for blank in _BLANK_BEYOND_ASCII) + rb"(?=[\t-\r ])",
            rb"(?<=[A-Za-z])(?=[0-9!-/:-@\[-`{-~])",
            rb"(?<=[0-9])(?=[A-Za-z!-/:-@\[-`{-~])",
            rb"(?<=%b)(?=[A-Za-z0-9])" % _SIGN,
        ]
    )
)
CUT_WINDOW = 1 << 12
"""Bytes at a part's end that are first searched for a place to cut."""


def last_cut(data: bytes) -> int:
    """The last position at which UTF-8 may be divided; see Tokenizer.cutter. A single piece is never divided."""
    window = CUT_WINDOW
    while True:
        at = 0
        for match in _CUT.finditer(data, max(1, len(data) - window)):
            at = match.start()
        if at or window >= len(data):
            return at
        window *= 16


class GPT2BPETokenizer(Tokenizer):
    """The ids of GPT-2 and of Megatron-LM's tokenizer of this name; GPT-2's files give a vocab_size of 50257.

    "<|endoftext|>" written in a text is encoded as ordinary characters.
    Letters newer than the Unicode version of the installed tiktoken count as punctuation.
    """

    name = "GPT2BPETokenizer"
    options = ("vocab_file", "merge_file")
    file_names = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}

    def __init__(self, vocab_file: str, merge_file: str):
        import tiktoken

        super().__init__()
        vocab = _parse_vocab(self._read("vocab_file", vocab_file), vocab_file)
        merges = _parse_merges(self._read("merge_file", merge_file), merge_file)
        if END_OF_TEXT not in vocab:
            raise TokenizerError(f"{vocab_file} has no {END_OF_TEXT}, which must end each document")
        self.eod = vocab[END_OF_TEXT]
        self.vocab_size = max(vocab.values()) + 1
        ranks = _mergeable_ranks(vocab, merges, vocab_file, merge_file)
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(self.name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens={})
        bytes_of = {i: token.encode() for token, i in vocab.items()}
        bytes_of |= {i: token for token, i in ranks.items()}
        self._bytes = [bytes_of.get(i, REPLACEMENT.encode()) for i in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        utf8(text)  # tiktoken would write U+FFFD without an error
        return self._encoding.encode_ordinary(text)

    @cached_property
    def _kernel(self) -> BPEKernel | None:
        return BPEKernel.build(self._ranks, self._encoding.encode_ordinary)

    @property
    def cutter(self) -> Callable[[bytes], int] | None:
        return last_cut

    @property
    def threads(self) -> bool:
        return self._kernel is not None

    def encode_batch(
        self, texts: Sequence[str], after: int | None = None, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._kernel is None or before is not None:
            return super().encode_batch(texts, after, before)
        return self._kernel.encode_batch([utf8(text) for text in texts], after)

    def decode(self, ids: Iterable[int]) -> str:
        return joined(ids, self._bytes)


def byte_alphabet() -> dict[str, int]:
    """Character of the files -> byte: a byte that is printable in Latin-1 is itself, the others are 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _parse_vocab(content: bytes, path: str) -> dict[str, int]:
    try:
        vocab = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"--vocab-file {path} is not JSON: {error}") from error
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise TokenizerError(
            f'--vocab-file {path} must be a JSON object {{"token": id, ...}} like GPT-2\'s encoder.json'
        )
    try:
        "".join(vocab).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"--vocab-file {path} has a token without a UTF-8 form: {error}") from error
    if max(vocab.values()) >= MAX_IDS:
        raise TokenizerError(f"--vocab-file {path} has the id {max(vocab.values()):,}; ids must be below {MAX_IDS:,}")
    if len(set(vocab.values())) < len(vocab):
        raise TokenizerError(f"--vocab-file {path} gives the same id to two tokens")
    return vocab


def _parse_merges(content: bytes, path: str) -> list[tuple[str, str]]:
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"--merge-file {path} is not UTF-8: {error}") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise TokenizerError(f"--merge-file {path}, line {number}: {line!r} is not a pair of tokens")
        merges.append((pair[0], pair[1]))
    return merges


def _mergeable_ranks(
    vocab: dict[str, int], merges: list[tuple[str, str]], vocab_file: str, merge_file: str
) -> dict[bytes, int]:
    """tiktoken's table {bytes: id}. tiktoken merges the lowest id first, so that ids must follow the merges' order."""
    alphabet = byte_alphabet()
    products = [left + right for left, right in merges]
    missing = [token for token in [*alphabet, *products] if token not in vocab]
    if missing:
        raise TokenizerError(
            f"{vocab_file} lacks {len(missing)} tokens that {merge_file} or plain bytes need, "
            f"the first {missing[0]!r}; the two files must belong together"
        )
    foreign = next((token for token in products if not alphabet.keys() >= set(token)), None)
    if foreign is not None:
        raise TokenizerError(f"{merge_file}: {foreign!r} holds a character that stands for no byte")
    ids = [vocab[token] for token in products]
    if any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)):
        raise TokenizerError(
            f"the ids in {vocab_file} do not follow the order of the merges in {merge_file}, as GPT-2's do; "
            "use HFTokenizer with a tokenizer.json instead"
        )
    tokens = [*alphabet, *products]
    return {bytes(alphabet[c] for c in token): vocab[token] for token in tokens}


SLACK = 8  # ids that the kernel may write beyond the last
GAP = np.dtype([("start", "<i8"), ("end", "<i8"), ("token", "<i8"), ("text", "<i8")])
"""A part that csrc's encoder leaves to Python: its bytes, the number of the token before which it stands, its text."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load_or_warn("bpe", "BPE runs in tiktoken alone, the same but slower")
    if library is None:
        return None
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    library.bpe_new.argtypes, library.bpe_new.restype = [ctypes.c_char_p, pointer, pointer, i64], pointer
    library.bpe_delete.argtypes, library.bpe_delete.restype = [pointer], None
    library.bpe_gaps.argtypes, library.bpe_gaps.restype = [i64, i64], i64
    library.bpe_encode.argtypes = [pointer, ctypes.c_char_p, pointer, i64, i64, pointer, pointer, pointer]
    library.bpe_encode.restype = i64
    return library


class BPEKernel:
    """GPT-2's BPE with a table {token: id}, which must hold every single byte; made by ``build``."""

    def __init__(self, library: ctypes.CDLL, ranks: Mapping[bytes, int], encode: Callable[[str], list[int]]):
        self._library, self._encode = library, encode
        ends = np.cumsum([len(token) for token in ranks], dtype=np.int64)
        ids = np.array(list(ranks.values()), np.uint32)
        self._handle = library.bpe_new(b"".join(ranks), ends.ctypes.data, ids.ctypes.data, len(ids))
        weakref.finalize(self, library.bpe_delete, self._handle)

    @classmethod
    def build(cls, ranks: Mapping[bytes, int], encode: Callable[[str], list[int]]) -> BPEKernel | None:
        """The kernel, or None on a machine where it cannot be built.

        Args:
            ranks: the table; the two neighbours whose joint token has the lowest id are merged first.
            encode: the same BPE for any text; it encodes the parts around characters beyond ASCII.
        """
        library = _library()
        return None if library is None else cls(library, ranks, encode)

    def encode_batch(self, texts: Sequence[bytes], after: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of all texts end to end, number of tokens of each text), as uint32 and int64.

        Args:
            texts: valid UTF-8.
            after: id to put after each text that is not empty.
        """
        data = b"".join(texts)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        tokens = np.empty(len(data) + len(texts) + SLACK, np.uint32)
        lengths = np.empty(len(texts), np.int64)
        gaps = np.empty(self._library.bpe_gaps(len(data), len(texts)), GAP)
        count = self._library.bpe_encode(
            self._handle, data, ends.ctypes.data, len(texts), -1 if after is None else after,
            tokens.ctypes.data, lengths.ctypes.data, gaps.ctypes.data,
        )  # fmt: skip
        tokens = tokens[: lengths.sum()]
        return self._fill(data, tokens, lengths, gaps[:count]) if count else (tokens, lengths)

    def _fill(
        self, data: bytes, tokens: np.ndarray, lengths: np.ndarray, gaps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        bounds = zip(gaps["start"].tolist(), gaps["end"].tolist(), strict=True)
        encoded = [self._encode(data[start:end].decode()) for start, end in bounds]
        sizes = np.array([len(ids) for ids in encoded])
        np.add.at(lengths, gaps["text"], sizes)
        return np.insert(tokens, np.repeat(gaps["token"], sizes), [i for ids in encoded for i in ids]), lengths
