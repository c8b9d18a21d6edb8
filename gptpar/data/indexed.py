"""Reads and writes Megatron's token corpus: ``<prefix>.bin`` has the tokens, ``<prefix>.idx`` each sequence's place.

The .idx file is little-endian and without padding: magic, u64 version, u8 dtype code, u64 S sequences, u64 D document
entries, int32[S] lengths in tokens, int64[S] byte offsets into .bin, int64[D] document index (document k holds the
sequences [d[k], d[k+1])). Multimodal corpora also have int8[S] modes, which are ignored here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from gptpar.errors import DataError
from gptpar.system.files import (
    full_disk_named,
    name_full_disk,
    open_regular,
    remove_abandoned,
    sync_file,
    temporary_name,
)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
TOKEN_CODES = {np.dtype(name): code for code, name in DTYPES.items() if "f" not in name}
MAX_SEQUENCE = 2**31 - 1
SCAN_CHUNK = 1 << 20  # entries that are checked together, so that checking a corpus takes a few MB


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron's writer chooses for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def negative_token(where: str, token: int) -> DataError:
    """The error for a negative number among the tokens of a corpus."""
    return DataError(
        f"{where} is {token}, but token ids cannot be negative (another program may have written it as padding, which "
        "corpora must not contain): make the corpus again without it"
    )


class TokenFile:
    """The numbers in a file, which are read as they are asked for.

    They are not mapped: a file that is cut short, or a disk that fails, while its pages are mapped kills the process
    with SIGBUS.

    Args:
        path: a file of whole numbers.
        dtype: the numbers' dtype.

    Raises:
        DataError: from reading, if the file has become shorter.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self._file = open_regular(path)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, step = places.indices(self._length)
        assert step == 1
        wanted, at = max(0, stop - start) * self._dtype.itemsize, start * self._dtype.itemsize
        data = os.pread(self._file.fileno(), wanted, at)
        while len(data) < wanted:  # a read may be interrupted, or longer than the system's limit
            more = os.pread(self._file.fileno(), wanted - len(data), at + len(data))
            if not more:
                raise DataError(
                    f"{self._path} ends at byte {at + len(data):,}, and held {self._length * self._dtype.itemsize:,} "
                    "when it was opened: it was cut short meanwhile; copy or make the corpus again, and go on from the "
                    "newest checkpoint (--load)"
                )
            data += more
        return np.frombuffer(data, self._dtype)


class IndexedDataset:
    """Read-only view of one corpus; its index is memory-mapped.

    Attributes:
        lengths: int32[S], tokens per sequence.
        offsets: int64[S], byte offset of each sequence in the .bin file.
        document_index: int64[D], first sequence of each document, ending with S.
        tokens: all tokens of the corpus, one after the other, in ``dtype``.

    Raises:
        DataError: a file is missing, is no corpus, or is too short or too long, or its arrays contradict each other.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                wrong = "is no regular file" if path.exists() else "does not exist"
                raise DataError(f"{path} {wrong}; a data path is the common prefix of a .bin and an .idx file")
        self._index = index = _map(self.idx_path)
        self.dtype, num_sequences, num_entries = self._read_header(index)
        start = HEADER.size
        self.lengths = np.frombuffer(index, "<i4", num_sequences, start)
        self.offsets = np.frombuffer(index, "<i8", num_sequences, start + 4 * num_sequences)
        self.document_index = np.frombuffer(index, "<i8", num_entries, start + 12 * num_sequences)
        self._check_document_index()
        self.num_tokens = self._check_lengths()
        self._check_bin_size()
        self.tokens = TokenFile(self.bin_path, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence (None: to its end), read from the file."""
        first = int(self.offsets[sequence]) // self.dtype.itemsize
        available = int(self.lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(
                f"{self.prefix}: tokens [{offset}, {offset + length}) of sequence {sequence}, which holds "
                f"{self.lengths[sequence]}"
            )
        return self.tokens[first + offset : first + offset + length]

    def require_whole_index(self) -> None:
        """Look at the index again: a mapped file that was cut short reads as zeros, or kills the process with SIGBUS.

        Raises:
            DataError: it has another length than when it was opened.
        """
        if isinstance(self._index, mmap.mmap) and (found := self._index.size()) != len(self._index):
            raise DataError(
                f"{self.idx_path} holds {found:,} bytes, and held {len(self._index):,} when it was opened: it was "
                "changed meanwhile; copy or make the corpus again, and go on from the newest checkpoint (--load)"
            )

    def _read_header(self, index: bytes | mmap.mmap) -> tuple[np.dtype, int, int]:
        if len(index) < HEADER.size or index[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{self.idx_path} ({len(index):,} bytes) is not a Megatron index: it must start with {MAGIC!r}; make "
                "the corpus with `gptpar preprocess`"
            )
        _, version, code, num_sequences, num_entries = HEADER.unpack(index[: HEADER.size])
        if version != VERSION:
            raise DataError(f"{self.idx_path} has format version {version}, only {VERSION} is known; re-tokenize it")
        if code not in DTYPES or np.dtype(DTYPES[code]) not in TOKEN_CODES:
            raise DataError(f"{self.idx_path} has dtype code {code}; tokens are one of the codes 1 to 5 or 8")
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if len(index) not in (expected, expected + num_sequences):
            raise DataError(
                f"{self.idx_path} holds {len(index):,} bytes but {num_sequences:,} sequences and {num_entries:,} "
                f"document entries take {expected:,}; it is cut short or damaged, copy or make it again"
            )
        return np.dtype(DTYPES[code]), num_sequences, num_entries

    def _check_document_index(self) -> None:
        entries = self.document_index
        rising = all(np.all(np.diff(entries[i : i + SCAN_CHUNK + 1]) >= 0) for i in range(0, len(entries), SCAN_CHUNK))
        if not len(entries) or entries[0] != 0 or entries[-1] != len(self) or not rising:
            ends = f"{entries[0]:,} to {entries[-1]:,}" if len(entries) else "no entries"
            raise DataError(
                f"{self.idx_path} has a broken document index ({ends}; it must rise from 0 to {len(self):,}); copy "
                "or make the corpus again"
            )

    def _check_lengths(self) -> int:
        """Total number of tokens; the offsets must be the running sum of the lengths."""
        total = 0
        for i in range(0, len(self), SCAN_CHUNK):
            lengths = self.lengths[i : i + SCAN_CHUNK].astype(np.int64)
            ends = total + np.cumsum(lengths)
            bad = (lengths < 0) | ((ends - lengths) * self.dtype.itemsize != self.offsets[i : i + SCAN_CHUNK])
            if bad.any():
                at = int(bad.argmax())
                raise DataError(
                    f"{self.idx_path}: sequence {i + at:,} has length {lengths[at]:,} and offset "
                    f"{self.offsets[i + at]:,}, expected offset "
                    f"{int(ends[at] - lengths[at]) * self.dtype.itemsize:,}; the file is damaged, copy or make it "
                    "again"
                )
            total = int(ends[-1])
        return total

    def _check_bin_size(self) -> None:
        expected, found = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if found != expected:
            raise DataError(
                f"{self.bin_path} holds {found:,} bytes but its index promises {self.num_tokens:,} tokens of "
                f"{self.dtype.itemsize} bytes = {expected:,}; it is "
                f"{'cut short' if found < expected else 'too long'}, copy or make the corpus again"
            )


class IndexedDatasetWriter:
    """Writes a corpus to temporary files beside ``<prefix>``, and publishes both files when the corpus is complete.

    Use it as a context manager (an exception removes the temporary files) or call finalize(). Memory use does not
    depend on the number of documents: the index is kept in files without a name, which vanish with the process.

    Attributes:
        removed: temporary files of this prefix that a killed process had left; they are removed.

    State: ``_lengths`` and ``_documents`` have ``_num_sequences`` and ``_num_documents`` entries. ``_bin`` has the
    tokens of these sequences, and behind them ``_part`` tokens of a document that has not ended.

    Raises:
        DataError: a token does not fit the dtype, a sequence is too long, or an appended corpus has another
            dtype.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.typing.DTypeLike):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in TOKEN_CODES:
            raise DataError(
                f"tokens cannot be stored as {self.dtype}; choose an integer dtype up to int64, e.g. uint16"
            )
        self._bin_temp, self._idx_temp = (temporary_name(self.prefix + end) for end in (".bin", ".idx"))
        folder = Path(self.prefix).parent
        folder.mkdir(parents=True, exist_ok=True)
        self.removed = [name for end in (".bin", ".idx") for name in remove_abandoned(self.prefix + end)]
        self._bin: IO[bytes] = open(self._bin_temp, "wb")  # noqa: SIM115 - closed by finalize or discard
        # int32 tokens of each sequence
        self._lengths: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by discard
        # int64 sequences up to the end of each document
        self._documents: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._num_sequences = self._num_documents = 0
        self._part = 0  # tokens so far of a document that has not ended

    def add_document(self, tokens: np.typing.ArrayLike) -> None:
        """Append one document of one sequence; without tokens it is an empty document."""
        values = np.asarray(tokens)
        self.add_documents(values, np.array([values.size]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of one sequence each: their tokens end to end, and the number of tokens of each."""
        self._check(tokens, lengths)
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._extend_index(lengths[lengths > 0], self._num_sequences + np.cumsum(lengths > 0))

    def add_part(self, tokens: np.ndarray, *, last: bool) -> None:
        """Append tokens to a document, which ends with its last part; nothing else may be added before that."""
        self._part += tokens.size
        length = np.array([self._part])
        self._check(tokens, length)
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        if last:
            self._part = 0
            self._extend_index(length[length > 0], self._num_sequences + (length > 0))

    def forget_parts(self) -> None:
        """Remove the parts of a document that has not ended."""
        self._bin.seek(-self._part * self.dtype.itemsize, os.SEEK_END)
        self._bin.truncate()
        self._part = 0

    def append(self, other_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another corpus, byte for byte."""
        other = IndexedDataset(other_prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix} holds {other.dtype} tokens, {self.prefix} holds {self.dtype}; merge corpora made "
                "with the same tokenizer"
            )
        shift, ends = self._num_sequences, other.document_index[1:]
        for i in range(0, len(other), SCAN_CHUNK):
            self._extend_index(other.lengths[i : i + SCAN_CHUNK], ends[:0])
        for i in range(0, len(ends), SCAN_CHUNK):
            self._extend_index(other.lengths[:0], ends[i : i + SCAN_CHUNK] + shift)
        with open_regular(other.bin_path) as source:
            shutil.copyfileobj(source, self._bin, 1 << 24)

    def finalize(self) -> None:
        """Publish ``<prefix>.bin``, then ``<prefix>.idx``.

        An index already there is removed first, so that it is never seen beside the new tokens.

        Raises:
            DataError: a temporary file is gone; what was published before is left as it was.
        """
        with open(self._idx_temp, "wb") as index:
            self._write_index(index)
            for file in (self._bin, index):
                sync_file(file)
        for file in (self._bin, self._lengths, self._documents):
            file.close()
        lost = [str(path) for path in (self._bin_temp, self._idx_temp) if not path.is_file()]
        if lost:
            raise DataError(
                f"{' and '.join(lost)} vanished before {self.prefix} was complete, as if another writer had the same "
                "prefix; run it again alone"
            )
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        os.replace(self._bin_temp, self.prefix + ".bin")
        os.replace(self._idx_temp, self.prefix + ".idx")

    def discard(self) -> None:
        """Remove the temporary files; nothing is published."""
        for file in (self._bin, self._lengths, self._documents):
            file.close()
        for path in (self._bin_temp, self._idx_temp):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and not self._bin.closed:
                with full_disk_named(self.prefix + ".bin"):
                    self.finalize()
            elif isinstance(error, OSError):
                name_full_disk(error, self.prefix + ".bin")
        finally:
            self.discard()

    def _check(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        if lengths.size and lengths.max() > MAX_SEQUENCE:
            raise DataError(f"a document of {lengths.max():,} tokens exceeds the format's {MAX_SEQUENCE:,}; split it")
        limits = np.iinfo(self.dtype)
        if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < limits.min or tokens.max() > limits.max):
            raise DataError(
                f"{self.prefix}: token ids {tokens.min()} to {tokens.max()} ({tokens.dtype}) do not fit {self.dtype} "
                f"({limits.min} to {limits.max}); give the writer a dtype that holds the tokenizer's vocabulary"
            )

    def _extend_index(self, lengths: np.ndarray, document_ends: np.ndarray) -> None:
        self._lengths.write(lengths.astype("<i4").data)
        self._documents.write(document_ends.astype("<i8").data)
        self._num_sequences += len(lengths)
        self._num_documents += len(document_ends)

    def _write_index(self, file: IO[bytes]) -> None:
        sizes = self._num_sequences, self._num_documents + 1
        file.write(HEADER.pack(MAGIC, VERSION, TOKEN_CODES[self.dtype], *sizes))
        self._lengths.seek(0)
        shutil.copyfileobj(self._lengths, file, SCAN_CHUNK)
        total = 0
        self._lengths.seek(0)
        while chunk := self._lengths.read(4 * SCAN_CHUNK):
            lengths = np.frombuffer(chunk, "<i4")
            ends = total + np.cumsum(lengths, dtype=np.int64)
            file.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").data)
            total = int(ends[-1])
        file.write(bytes(8))  # the first document starts at sequence 0
        self._documents.seek(0)
        shutil.copyfileobj(self._documents, file, SCAN_CHUNK)


def removed_line(writers: Sequence[IndexedDatasetWriter]) -> str:
    """A line for the user about files that killed runs had left; empty if there were none."""
    removed = [name for writer in writers for name in writer.removed]
    return f"\nremoved {len(removed)} unfinished file(s) of a killed run: {', '.join(removed)}" if removed else ""


def _map(path: Path) -> bytes | mmap.mmap:
    with open_regular(path) as file:
        # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
