"""Documents from the files people have: JSON lines, plain or compressed, and plain text.

Reading and parsing are two steps, so that one process can read blocks of bytes and several can parse them.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptpar.data.zst import ZstdReader
from gptpar.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
COMPRESSIONS = (".gz", ".zst")
FORMATS = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Block:
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


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """Files meant by paths, globs and folders; a folder means all files of a known kind below it, sorted.

    Raises:
        DataError: inputs that match nothing, files of an unknown kind or named twice; all of them at once.
    """
    files: list[str] = []
    problems = []
    for name in inputs:
        if os.path.isdir(name):
            found = sorted(str(p) for p in Path(name).rglob("*") if p.is_file() and _suffixes(str(p)) is not None)
        elif os.path.isfile(name):
            found = [name]
        else:
            found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
        if not found:
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


def read_blocks(files: Sequence[str], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The files' bytes in order, in blocks of about `block_bytes`; a line or a text file is never divided.

    Raises:
        DataError: a file cannot be read or decompressed.
    """
    before = 0
    for path in files:
        try:
            with open(path, "rb") as raw, _decompressed(raw, path) as file:
                if _is_text(path):
                    yield Block(path, 1, file.read(), before + raw.tell())
                else:
                    line = 1
                    while lines := file.readlines(block_bytes):
                        yield Block(path, line, b"".join(lines), before + raw.tell())
                        line += len(lines)
            before += os.path.getsize(path)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def parse_block(
    block: Block, keys: Sequence[str], bad_lines: list[str] | None = None
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line number, the text of each key) of each document of a block; blank lines hold no document.

    A text file is one document, whatever the keys. Documents that cannot be parsed are described in
    `bad_lines`.

    Raises:
        DataError: a document cannot be parsed and `bad_lines` is None; names file and line.
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
    """The text of each document of the inputs (see `find_inputs`), in order."""
    for block in read_blocks(find_inputs(inputs)):
        for _, (text,) in parse_block(block, [key]):
            yield text


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} ({data[error.start]:#04x}) is not UTF-8") from None


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
