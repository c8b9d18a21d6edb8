"""Reads documents from files: JSON lines and plain text, compressed or not.

Reading and parsing are two steps, so that one process can read blocks of bytes and several can parse them. For .zst
there is Python's own module (from 3.14 on) or the zstandard package; truncated files are detected.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from gptpar.data.long_lines import PART_BYTES, Cut, Divider, LongLine
from gptpar.errors import DataError
from gptpar.system.files import open_regular

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
COMPRESSIONS = (".gz", ".zst")
FORMATS = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}"
BLOCK_BYTES = 1 << 20
"""Bytes of text, about, that a worker gets at a time."""
LONG_LINE_BYTES = 1 << 22  # a longer line is read in parts


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of a JSON file, or all of a text file.

    Attributes:
        path: the file.
        first_line: number of the first line, from 1.
        data: the bytes, uncompressed.
        consumed: bytes of all input files, as they lie on disk, read so far.
    """

    path: str
    first_line: int
    data: bytes
    consumed: int


@dataclass(frozen=True)
class Part:
    """Part of one document that is too long for memory.

    Attributes:
        path, consumed: as in TextBlock.
        line: number of the document's line, from 1.
        texts: UTF-8 of each key's text, which continues in the next part unless this is the last.
        offset: bytes of the text before this part, in a text file.
        last: the document ends here.
        problem: why the document cannot be read; its earlier parts have to be removed.
    """

    path: str
    line: int
    texts: tuple[bytes, ...]
    consumed: int
    offset: int = 0
    last: bool = False
    problem: str = ""


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that paths, globs and folders denote; a folder denotes all files of a known kind below it, sorted.

    Raises:
        DataError: an input matches nothing, or a file is of an unknown kind or named twice; it names all of them.
    """
    files: list[str] = []
    problems = []
    for name in inputs:
        found = _files_of(name)
        if not found and os.path.exists(name) and not os.path.isdir(name):
            problems.append(f"{name}: it is no regular file")
        elif not found:
            problems.append(f"{name}: no such file, or nothing in it ends in {FORMATS}")
        files += found
    problems += [f"{f}: unknown kind of file; known are {FORMATS}" for f in files if _suffixes(f) is None]
    seen: set[str] = set()
    for file in files:
        if os.path.realpath(file) in seen:
            problems.append(f"{file} is named twice, which would repeat its documents")
        seen.add(os.path.realpath(file))
    if problems:
        raise DataError("\n".join(problems))
    return files


def _files_of(name: str) -> list[str]:
    """The files that a path, a glob or a folder denotes."""
    if os.path.isdir(name):
        return sorted(str(p) for p in Path(name).rglob("*") if p.is_file() and _suffixes(str(p)) is not None)
    if os.path.isfile(name):
        return [name]
    return sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))


def read_blocks(files: Sequence[str], block_bytes: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """The files' bytes in order, in blocks of about ``block_bytes``; a line or a text file is never divided.

    Raises:
        DataError: a file cannot be read or decompressed.
    """
    for block in read_parts(files, (), None, block_bytes):
        assert isinstance(block, TextBlock)
        yield block


def read_parts(
    files: Sequence[str], keys: Sequence[str], cut: Cut | None, block_bytes: int = BLOCK_BYTES
) -> Iterator[TextBlock | Part]:
    """Read blocks as ``read_blocks`` does, but a line or a text file that is too long for memory in parts.

    Args:
        keys: the keys of a JSON line whose texts are read.
        cut: where a text may be divided; None: nowhere, so that every document is in memory as a whole.
    """
    before = 0
    for path in files:
        try:
            with open_regular(path) as raw, _decompressed(raw, path) as file:
                read = _read_text if _is_text(path) else _read_lines
                for block in read(path, file, keys, cut, block_bytes):
                    yield replace(block, consumed=before + raw.tell())
            before += os.path.getsize(path)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _read_text(
    path: str, file: IO[bytes], keys: Sequence[str], cut: Cut | None, block_bytes: int
) -> Iterator[TextBlock | Part]:
    data = file.read(PART_BYTES if cut else -1)
    if cut is None or len(data) < PART_BYTES:
        yield TextBlock(path, 1, data, 0)
        return
    divider, offset = Divider(cut), 0
    data = data.removeprefix(codecs.BOM_UTF8)
    while data:
        if part := divider.add(data):
            yield Part(path, 1, (part,) * len(keys), 0, offset)
            offset += len(part)
        data = file.read(PART_BYTES)
    yield Part(path, 1, (divider.rest(),) * len(keys), 0, offset, last=True)


def _read_lines(
    path: str, file: IO[bytes], keys: Sequence[str], cut: Cut | None, block_bytes: int
) -> Iterator[TextBlock | Part]:
    number = 1
    while data := file.read(block_bytes):
        if not data.endswith(b"\n"):
            rest = file.readline(LONG_LINE_BYTES if cut else -1)
            if cut and len(rest) == LONG_LINE_BYTES and not rest.endswith(b"\n"):
                whole, newline, start = data.rpartition(b"\n")
                if newline:
                    yield TextBlock(path, number, whole + newline, 0)
                number += data.count(b"\n")
                yield from _read_long_line(path, number, start + rest, file, keys, cut)
                number += 1
                continue
            data += rest
        yield TextBlock(path, number, data, 0)
        number += data.count(b"\n")


def _read_long_line(
    path: str, number: int, start: bytes, file: IO[bytes], keys: Sequence[str], cut: Cut
) -> Iterator[Part]:
    def chunks() -> Iterator[bytes]:
        chunk = start.removeprefix(codecs.BOM_UTF8) if number == 1 else start
        while chunk and not chunk.endswith(b"\n"):
            yield chunk
            chunk = file.readline(PART_BYTES)
        yield chunk.removesuffix(b"\n")

    line = chunks()
    waiting: tuple[bytes, ...] | None = None
    try:
        for texts in LongLine(line, keys, cut, _values).parts():
            if waiting is not None:
                yield Part(path, number, waiting, 0)
            waiting = texts
        if waiting is not None:
            yield Part(path, number, waiting, 0, last=True)
    except DataError as error:
        for _ in line:
            pass
        yield Part(path, number, (), 0, last=True, problem=str(error))


def parse_block(
    block: TextBlock, keys: Sequence[str], bad_lines: list[str] | None = None
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line number, the text of each key) of each document of a block; blank lines hold no document.

    A text file is one document, whatever the keys. Documents that cannot be parsed are described in
    ``bad_lines``.

    Raises:
        DataError: a document cannot be parsed and ``bad_lines`` is None; names file and line.
    """
    text_file = _is_text(block.path)
    lines = [block.data] if text_file else block.data.split(b"\n")
    for number, line in enumerate(lines, block.first_line):
        if not text_file and not line.strip():
            continue
        try:
            text = _decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            texts = (text,) * len(keys) if text_file else _values(text, keys)
        except DataError as error:
            problem = f"{block.path}, line {number}: {error}"
            if bad_lines is None:
                raise DataError(problem) from None
            bad_lines.append(problem)
            continue
        yield number, texts


def read_documents(inputs: Sequence[str], key: str = "text") -> Iterator[str]:
    """The text of each document of the inputs (see ``find_inputs``), in order."""
    for block in read_blocks(find_inputs(inputs)):
        for _, (text,) in parse_block(block, [key]):
            yield text


def parse_part(part: Part) -> tuple[str, ...]:
    """The text of each key.

    Raises:
        DataError: the document cannot be read; names file and line.
    """
    try:
        if part.problem:
            raise DataError(part.problem)
        return tuple(_decode(text, part.offset) for text in part.texts)
    except DataError as error:
        raise DataError(f"{part.path}, line {part.line}: {error}") from None


def _decode(data: bytes, offset: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {offset + error.start + 1} ({data[error.start]:#04x}) is not UTF-8") from None


def _values(line: str, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise DataError(f"a JSON object is needed, this is {type(document).__name__}")
    for key in keys:
        if key not in document:
            raise DataError(f'no key "{key}"; there are: {", ".join(document) or "none"}')
        if not isinstance(document[key], str):
            raise DataError(f'the value of "{key}" is {type(document[key]).__name__}, not a string')
        try:
            document[key].encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f'the value of "{key}" holds half a character (a lone \\ud800..\\udfff)') from None
    return tuple(document[key] for key in keys)


def _suffixes(path: str) -> tuple[str, str] | None:
    """(format, compression) of a known kind of file; the compression may be ""."""
    stem, compression = os.path.splitext(path)
    if compression not in COMPRESSIONS:
        stem, compression = path, ""
    suffix = os.path.splitext(stem)[1]
    return (suffix, compression) if suffix in JSON_SUFFIXES + TEXT_SUFFIXES else None


def _is_text(path: str) -> bool:
    kind = _suffixes(path)
    return kind is not None and kind[0] in TEXT_SUFFIXES


def _decompressed(raw: IO[bytes], path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(ZstdReader(raw), BLOCK_BYTES) if path.endswith(".zst") else raw


READ_BYTES = 1 << 10
"""Four bytes may become 128 KiB, so that a larger part could fill the memory."""


def zstd_library() -> tuple[Callable[[], Any], type[Exception]]:
    """(function that makes a decompressor of one frame, the exception that this raises).

    Raises:
        DataError: neither library is installed.
    """
    try:
        from compression import zstd
    except ImportError:
        pass
    else:
        return zstd.ZstdDecompressor, zstd.ZstdError
    try:
        import zstandard
    except ImportError as error:
        raise DataError("a .zst file needs the zstandard library: pip install 'gptpar[zst]'") from error
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


class ZstdReader(io.RawIOBase):
    """The content of all frames of a file, one after the other.

    Raises:
        OSError: the file is damaged, or ends within a frame, which some versions of the libraries' own file objects
            do not report.
    """

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._new_frame, self._error = zstd_library()
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise OSError("the file ends in the middle of a zstd frame")
                return 0
            self._decompress()
        size = min(len(buffer), len(self._output))  # a view: a few input bytes may have made megabytes
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._new_frame()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._error as error:
            raise OSError(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
