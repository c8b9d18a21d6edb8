"""What preprocess and merge read and write, byte for byte, and what is left behind after an error."""

import gzip
import json
import struct
from pathlib import Path

import pytest

from gptpar.cli.merge import main as merge_main
from gptpar.cli.preprocess import main
from gptpar.data.readers import parse_block, read_blocks, read_documents
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


def files(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_the_bytes_are_megatrons(tmp_path: Path):
    corpus = write_lines(
        tmp_path / "c.jsonl", {"text": "ab", "title": ""}, {"text": "", "title": "xyz"}, {"text": "é", "title": "c"}
    )
    out = tmp_path / "out"
    assert main(["--input", corpus, "--output-prefix", str(out / "c"), "--append-eod", *BYTES]) == 0
    assert names(out) == ["c_text_document.bin", "c_text_document.idx"]
    tokens = struct.pack("<6H", 97, 98, 256, 0xC3, 0xA9, 256)
    # the empty text is an empty document: its entry repeats, and it gets no eod
    assert files(out / "c_text_document") == (tokens, expected_index(8, 2, [3, 3], [0, 1, 1, 2]))
    keys = ["--json-keys", "title", "text", "--dataset-impl", "mmap"]
    assert main(["--input", corpus, "--output-prefix", str(out / "c"), *BYTES, *keys]) == 0
    tokens = struct.pack("<4H", 97, 98, 0xC3, 0xA9)
    assert files(out / "c_text_document") == (tokens, expected_index(8, 2, [2, 2], [0, 1, 1, 2]))
    tokens = struct.pack("<4H", 120, 121, 122, 99)
    assert files(out / "c_title_document") == (tokens, expected_index(8, 2, [3, 1], [0, 0, 1, 2]))


@pytest.mark.parametrize(("vocab_size", "code", "kind"), [(65498, 8, "H"), (65499, 4, "i")])
def test_the_token_type_follows_the_vocabulary(vocab_size: int, code: int, kind: str, tmp_path: Path):
    corpus = write_lines(tmp_path / "c.jsonl", {"text": "5 65497"})
    size = ["--vocab-size", str(vocab_size)]
    assert main(["--input", corpus, "--output-prefix", str(tmp_path / "c"), "--append-eod", *NULL, *size]) == 0
    tokens = struct.pack(f"<3{kind}", 5, 65497, vocab_size)
    assert files(tmp_path / "c_text_document") == (tokens, expected_index(code, struct.calcsize(kind), [3], [0, 1]))


def test_an_error_leaves_earlier_files_and_no_others(tmp_path: Path):
    good = write_lines(tmp_path / "good.jsonl", {"text": "1 2"})
    bad = write_lines(tmp_path / "bad.jsonl", {"text": "3"}, {"text": "7 10"})
    arguments = ["--output-prefix", str(tmp_path / "c"), *NULL, "--vocab-size", "10"]
    main(["--input", good, *arguments])
    before, listing = files(tmp_path / "c_text_document"), names(tmp_path)
    with pytest.raises(DataError, match=f"^{bad}, line 2: token id 10 is outside 0..9"):
        main(["--input", good, bad, *arguments])
    assert names(tmp_path) == listing and files(tmp_path / "c_text_document") == before
    main(["--input", bad, *arguments, "--skip-bad-lines"])
    assert names(tmp_path) == listing and files(tmp_path / "c_text_document")[0] == struct.pack("<H", 3)


def test_merge(tmp_path: Path):
    shards = tmp_path / "shards"
    for name, texts in (("b", ["c", ""]), ("a", ["", "ab"])):
        corpus = write_lines(tmp_path / f"{name}.jsonl", *({"text": text} for text in texts))
        main(["--input", corpus, "--output-prefix", str(shards / name), *BYTES])
    prefixes = [str(shards / f"{name}_text_document") for name in "ab"]
    for inputs in ([str(shards)], prefixes, [prefixes[0], f"{prefixes[1]}.bin"]):
        assert merge_main(["--input", *inputs, "--output-prefix", str(tmp_path / "all")]) == 0
        tokens = struct.pack("<3H", 97, 98, 99)
        assert files(tmp_path / "all") == (tokens, expected_index(8, 2, [2, 1], [0, 0, 1, 2, 2]))
    merge_main(["--input", *reversed(prefixes), "--output-prefix", str(tmp_path / "all")])
    assert files(tmp_path / "all")[1] == expected_index(8, 2, [1, 2], [0, 1, 1, 1, 2])


# --- Reading documents: every format gives the same text, and bad input names its file and line ---------------------


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


def test_a_text_file_is_one_document_and_lines_end_at_newlines_only(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert list(read_documents([str(tmp_path)])) == ["one\r\n\n\ntwo\n", ""]
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
