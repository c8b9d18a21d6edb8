"""The corpus made from a standard library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptpar.data import standard_library
from gptpar.errors import DataError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "test" / "lib"  # a folder above the library may have any name
    files = {
        "b.py": "b = 'é'\n",
        "a/c.txt": "c",
        "a/copy.py": "b = 'é'\n",
        "empty.py": "\n",
        "binary.so": "x",
        "test/t.py": "t",
        "site-packages/p.py": "p",
        "pydoc_data/topics.py": "topics = {'with': 'The with statement', 'del': 'The del statement'}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"\xff")
    monkeypatch.setattr(standard_library, "MIN_BYTES", 10)
    return root


def read(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(document["source"], document["text"]) for document in map(json.loads, lines)]


def test_documents(library: Path, tmp_path: Path):
    output = tmp_path / "out" / "c.jsonl"
    summary = standard_library.make_corpus(str(output), library)
    assert sorted(read(output)) == [
        ("a/c.txt", "c"),
        ("a/copy.py", "b = 'é'\n"),
        ("pydoc_data/topics.py#del", "The del statement"),
        ("pydoc_data/topics.py#with", "The with statement"),
    ]
    assert summary == f"wrote 4 documents, 45 bytes of text, from {library} to {output}"
    first = output.read_bytes()
    standard_library.make_corpus(str(output), library)
    assert output.read_bytes() == first


def test_a_limit_keeps_the_first_documents(library: Path, tmp_path: Path):
    standard_library.make_corpus(str(tmp_path / "all"), library)
    standard_library.make_corpus(str(tmp_path / "some"), library, max_bytes=30)
    everything, some = read(tmp_path / "all"), read(tmp_path / "some")
    assert 1 <= len(some) < 4 and some == everything[: len(some)]
    with pytest.raises(DataError, match="is already larger than 0 bytes"):
        standard_library.make_corpus(str(tmp_path / "none"), library, max_bytes=0)
    assert not list(tmp_path.glob("none*"))
