"""Byte-level BPE of many texts at once: C++ (csrc/bpe.cpp) encodes ASCII, the caller's encoder all other parts."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gptpar.system import native

SLACK = 8  # ids that the kernel may write beyond the last
GAP = np.dtype([("start", "<i8"), ("end", "<i8"), ("token", "<i8"), ("text", "<i8")])


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
    """GPT-2's BPE with a table {token: id}, which must hold every single byte; made by `build`."""

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
