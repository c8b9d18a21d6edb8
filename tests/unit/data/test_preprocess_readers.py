"""Reading documents: every format gives the same text, and bad input names its file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gptpar.data.readers import parse_block, read_blocks, read_documents
from gptpar.errors import DataError

TEXTS = ["one", "", "zwei é\n\t", "日本😀\u2028", "x" * 5000]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def parse(path: Path, keys: tuple[str, ...] = ("text",), bad: list[str] | None = None) -> list[tuple[str, ...]]:
    return [texts for block in read_blocks([str(path)], 64) for _, texts in parse_block(block, keys, bad)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst"])
def test_every_compression_gives_the_same_documents(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(compress(name, LINES))
    assert list(read_documents([str(path)])) == TEXTS
    blocks = list(read_blocks([str(path)], 64))
    assert b"".join(block.data for block in blocks) == LINES
    assert [block.first_line for block in blocks] == [1, 4]
    assert blocks[-1].consumed == path.stat().st_size


def compress(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data[:50]) + gzip.compress(data[50:])
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        return zstandard.compress(data[:50]) + zstandard.compress(data[50:])
    return data


def test_a_text_file_is_one_document(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert list(read_documents([str(tmp_path)])) == ["one\r\n\n\ntwo\n", ""]


def test_lines_end_at_newlines_only(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\x85c"}\r\n\n  \n{"text": "last"}'.encode())
    assert parse(path) == [("a\u2028b\x85c",), ("last",)]


BAD_LINES = [
    (b'{"text": "a"', "not JSON"),
    (b'"text"', "a JSON object is needed, this is str"),
    (b'{"body": 1, "id": 2}', 'no key "text"; there are: body, id'),
    (b'{"text": "\xff"}', r"byte 11 \(0xff\) is not UTF-8"),
    (b'{"text": "\\ud800"}', ".* holds half a character"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_line_names_file_and_line(line: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 7 + line + b"\n" + b'{"text": "good"}\n')
    with pytest.raises(DataError, match=f"^{path}, line 8: {problem}"):
        parse(path)
    bad: list[str] = []
    assert parse(path, bad=bad) == [("good",)] * 8
    assert len(bad) == 1 and bad[0].startswith(f"{path}, line 8: ")
