"""The corpus made of Python's standard library."""

import json
from pathlib import Path

import pytest

from gptpar.data import standard_library
from gptpar.errors import DataError


def test_the_limit_leaves_large_documents_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their place in the order, and no others."""
    monkeypatch.setattr(standard_library, "MIN_BYTES", 1)
    texts = {f"m{size}.py": "x" * size for size in (90, 7, 1, 80, 3, 70, 5)}
    monkeypatch.setattr(standard_library, "standard_library_documents", lambda root: iter(texts.items()))
    output = tmp_path / "corpus.jsonl"
    said = standard_library.make_corpus(str(output), tmp_path, 16)
    assert sorted(len(json.loads(line)["text"]) for line in output.read_text().splitlines()) == [1, 3, 5, 7]
    assert said.startswith("wrote 4 documents, 16 bytes")
    with pytest.raises(DataError, match="each document is larger than 0 bytes"):
        standard_library.make_corpus(str(output), tmp_path, 0)
