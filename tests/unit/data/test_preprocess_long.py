"""Documents too long to hold give the files that they would give in one piece."""

import json
from pathlib import Path

import pytest

from gptpar.cli.preprocess import main
from gptpar.data import long_lines, readers
from tests.pairs import every_pair
from tests.unit.data.tokenizer.vocabularies import small_vocabulary, write_files

TEXT = 'the cat sat, the cat\'s 12 hats.\n  d\u00e9j\u00e0 vu \U0001f600 \u65e5\u672c "q" \\ \x07 ' * 40
OTHERS = ["short", "", "the cat"]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch):
    for module, name, value in (
        (long_lines, "PART_BYTES", 97), (readers, "PART_BYTES", 97), (readers, "LONG_LINE_BYTES", 300),
        (readers, "BLOCK_BYTES", 64),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(readers.read_parts, "__defaults__", (64,))


def arguments(folder: Path, kind: str) -> list[str]:
    if kind == "ByteLevelTokenizer":
        return ["--tokenizer-type", kind, "--append-eod"]
    write_files(folder, *small_vocabulary(25))
    files = ["--vocab-file", str(folder / "encoder.json"), "--merge-file", str(folder / "vocab.bpe")]
    return ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", *files]


def files_of(folder: Path, *flags: str, name: str = "out") -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    assert main(["--output-prefix", str(folder / name), *flags]) == 0
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"{name}_*"))}


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every document is held."""
    monkeypatch.setattr(readers, "PART_BYTES", 1 << 30)
    monkeypatch.setattr(readers, "LONG_LINE_BYTES", 1 << 30)


@pytest.mark.slow
@every_pair(kind=["ByteLevelTokenizer", "GPT2BPETokenizer"], workers=["1", "2"], escaped=[True, False])
def test_long_lines(kind: str, workers: str, escaped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = [
        {"text": OTHERS[0], "title": "t"},
        {"id": [1, {"text": "x" * 400}], "text": TEXT, "note": "\u65e5" * 500, "title": ""},
        {"text": OTHERS[1], "title": TEXT},
        {"title": TEXT[::-1], "a\nb": {"text": TEXT}, "text": TEXT * 2},
        {"text": OTHERS[2], "title": "the end"},
    ]
    corpus = tmp_path / "c.jsonl"
    lines = [json.dumps(document, ensure_ascii=escaped) for document in documents]
    corpus.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    flags = ["--input", str(corpus), "--json-keys", "text", "title", "--workers", workers, *arguments(tmp_path, kind)]
    parts = files_of(tmp_path / "parts", *flags)
    assert any(isinstance(block, readers.Part) for block in readers.read_parts([str(corpus)], ["text"], len))
    whole(monkeypatch)
    assert parts == files_of(tmp_path / "whole", *flags)
    assert len(parts) == 4


def test_a_long_blank_line_holds_no_document_and_a_long_line_s_mistake_says_how_it_is_counted(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(f'{{"text": "a"}}\n{" " * 2000}\n{{"text": "{"x" * 2000}" "y": 1}}\n')
    parts = [one for one in readers.read_parts([str(corpus)], ["text"], len) if isinstance(one, readers.Part)]
    mistake = parts[-1]
    assert {one.line for one in parts} == {3}
    assert mistake.problem.startswith("not JSON: Expecting ',' delimiter: line 1 column 13")
    assert mistake.problem.endswith(", not counting its long strings")
