"""The files that preprocess and merge write, byte for byte, and what is left behind after an error."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from gptpar.cli.merge import main as merge_main
from gptpar.cli.preprocess import main
from gptpar.errors import DataError

BYTES = ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
NULL = ["--tokenizer-type", "NullTokenizer", "--workers", "1"]


def expected_index(code: int, itemsize: int, lengths: list[int], documents: list[int]) -> bytes:
    offsets = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    return header + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(documents)}q", *lengths, *offsets, *documents)


def write_lines(path: Path, *documents: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_bytes_are_megatrons(tmp_path: Path):
    corpus = write_lines(tmp_path / "c.jsonl", {"text": "ab"}, {"text": ""}, {"text": "é"})
    prefix = str(tmp_path / "out" / "c")
    assert main(["--input", corpus, "--output-prefix", prefix, "--append-eod", *BYTES]) == 0
    assert names(tmp_path / "out") == ["c_text_document.bin", "c_text_document.idx"]
    tokens = struct.pack("<6H", 97, 98, 256, 0xC3, 0xA9, 256)
    assert Path(f"{prefix}_text_document.bin").read_bytes() == tokens
    # the empty text is an empty document: its entry repeats, and it gets no eod
    assert Path(f"{prefix}_text_document.idx").read_bytes() == expected_index(8, 2, [3, 3], [0, 1, 1, 2])


def test_without_eod_and_with_several_keys(tmp_path: Path):
    corpus = write_lines(tmp_path / "c.jsonl", {"text": "ab", "title": ""}, {"text": "c", "title": "xyz"})
    arguments = ["--input", corpus, "--output-prefix", str(tmp_path / "c"), *BYTES, "--dataset-impl", "mmap"]
    assert main([*arguments, "--json-keys", "title", "text"]) == 0
    assert (tmp_path / "c_text_document.bin").read_bytes() == struct.pack("<3H", 97, 98, 99)
    assert (tmp_path / "c_text_document.idx").read_bytes() == expected_index(8, 2, [2, 1], [0, 1, 2])
    assert (tmp_path / "c_title_document.bin").read_bytes() == struct.pack("<3H", 120, 121, 122)
    assert (tmp_path / "c_title_document.idx").read_bytes() == expected_index(8, 2, [3], [0, 0, 1])


@pytest.mark.parametrize(("vocab_size", "code", "kind"), [(65498, 8, "H"), (65499, 4, "i")])
def test_the_token_type_follows_the_vocabulary(vocab_size: int, code: int, kind: str, tmp_path: Path):
    corpus = write_lines(tmp_path / "c.jsonl", {"text": "5 65497"})
    size = ["--vocab-size", str(vocab_size)]
    assert main(["--input", corpus, "--output-prefix", str(tmp_path / "c"), "--append-eod", *NULL, *size]) == 0
    assert (tmp_path / "c_text_document.bin").read_bytes() == struct.pack(f"<3{kind}", 5, 65497, vocab_size)
    itemsize = struct.calcsize(kind)
    assert (tmp_path / "c_text_document.idx").read_bytes() == expected_index(code, itemsize, [3], [0, 1])


def test_an_error_leaves_earlier_files_and_no_others(tmp_path: Path):
    good = write_lines(tmp_path / "good.jsonl", {"text": "1 2"})
    bad = write_lines(tmp_path / "bad.jsonl", {"text": "3"}, {"text": "7 10"})
    arguments = ["--output-prefix", str(tmp_path / "c"), *NULL, "--vocab-size", "10"]
    main(["--input", good, *arguments])
    before = (tmp_path / "c_text_document.bin").read_bytes(), (tmp_path / "c_text_document.idx").read_bytes()
    listing = names(tmp_path)
    with pytest.raises(DataError, match=f"^{bad}, line 2: token id 10 is outside 0..9"):
        main(["--input", good, bad, *arguments])
    assert names(tmp_path) == listing
    assert ((tmp_path / "c_text_document.bin").read_bytes(), (tmp_path / "c_text_document.idx").read_bytes()) == before
    main(["--input", bad, *arguments, "--skip-bad-lines"])
    assert (tmp_path / "c_text_document.bin").read_bytes() == struct.pack("<H", 3)
    assert names(tmp_path) == listing


def test_merge(tmp_path: Path):
    shards = tmp_path / "shards"
    for name, texts in (("b", ["c", ""]), ("a", ["", "ab"])):
        corpus = write_lines(tmp_path / f"{name}.jsonl", *({"text": text} for text in texts))
        main(["--input", corpus, "--output-prefix", str(shards / name), *BYTES])
    prefixes = [str(shards / f"{name}_text_document") for name in "ab"]
    for inputs in ([str(shards)], prefixes, [prefixes[0], f"{prefixes[1]}.bin"]):
        assert merge_main(["--input", *inputs, "--output-prefix", str(tmp_path / "all")]) == 0
        assert (tmp_path / "all.bin").read_bytes() == struct.pack("<3H", 97, 98, 99)
        assert (tmp_path / "all.idx").read_bytes() == expected_index(8, 2, [2, 1], [0, 0, 1, 2, 2])
    merge_main(["--input", *reversed(prefixes), "--output-prefix", str(tmp_path / "all")])
    assert (tmp_path / "all.idx").read_bytes() == expected_index(8, 2, [1, 2], [0, 1, 1, 1, 2])
