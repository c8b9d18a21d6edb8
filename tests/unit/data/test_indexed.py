"""The corpus format: byte-level golden, and damage of every kind."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter
from gptpar.errors import DataError
from tests.unit.data.corpora import write_corpus

DOCUMENTS = [[1, 2, 3], [], [65535], [7, 8]]  # the second one is an empty document
GOLDEN_BIN = struct.pack("<6H", 1, 2, 3, 65535, 7, 8)
GOLDEN_IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 3, 5)
    + struct.pack("<3i", 3, 1, 2)
    + struct.pack("<3q", 0, 6, 8)
    + struct.pack("<5q", 0, 1, 1, 2, 3)
)


def write(prefix: Path) -> Path:
    write_corpus(prefix, DOCUMENTS, "uint16")
    return prefix


def read(prefix: Path, end: str) -> bytes:
    return Path(f"{prefix}{end}").read_bytes()


def test_the_files_are_the_golden_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus")
    assert read(prefix, ".bin") == GOLDEN_BIN
    assert read(prefix, ".idx") == GOLDEN_IDX
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx"]


def test_many_documents_at_once_and_one_in_parts(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        writer.add_documents(np.array([1, 2, 3], np.uint32), np.array([3, 0]))
        writer.add_part(np.array([9, 9]), last=False)
        writer.add_part(np.array([9]), last=False)
        writer.forget_parts()
        writer.add_part(np.array([65535]), last=True)
        writer.add_part(np.array([7]), last=False)
        writer.add_part(np.array([8]), last=True)
    assert (read(tmp_path / "corpus", ".bin"), read(tmp_path / "corpus", ".idx")) == (GOLDEN_BIN, GOLDEN_IDX)
    with IndexedDatasetWriter(tmp_path / "empty", "uint16") as writer:
        writer.add_documents(np.array([], np.int64), np.array([], np.int64))
        writer.add_part(np.array([], np.int64), last=True)
    assert IndexedDataset(tmp_path / "empty").document_index.tolist() == [0, 0]


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    corpus = IndexedDataset(write(tmp_path / "corpus"))
    assert len(corpus) == 3 and corpus.num_tokens == 6 and corpus.dtype == np.uint16
    assert corpus.lengths.tolist() == [3, 1, 2]
    assert corpus.offsets.tolist() == [0, 6, 8]
    assert corpus.document_index.tolist() == [0, 1, 1, 2, 3]
    assert corpus.get(0).tolist() == [1, 2, 3]
    assert corpus.get(0, 1).tolist() == [2, 3]
    assert corpus.get(0, 1, 1).tolist() == [2]
    assert corpus.get(2, 2, 0).tolist() == []
    with pytest.raises(IndexError, match=r"tokens \[1, 4\) of sequence 2, which holds 2"):
        corpus.get(2, 1, 3)


def patched(position: int, value: bytes) -> bytes:
    return GOLDEN_IDX[:position] + value + GOLDEN_IDX[position + len(value) :]


@pytest.mark.parametrize(
    "idx, bin_, message",
    [
        (GOLDEN_IDX[:20], GOLDEN_BIN, r"\(20 bytes\) is not a Megatron index"),
        (GOLDEN_IDX[:40], GOLDEN_BIN, "holds 40 bytes but 3 sequences and 5 document entries take 110"),
        (patched(9, b"\x02"), GOLDEN_BIN, "format version 2"),
        (patched(34, struct.pack("<i", 4)), GOLDEN_BIN, "sequence 1 has length 1 and offset 6, expected offset 8"),
        (patched(38, struct.pack("<i", -1)), GOLDEN_BIN, "sequence 1 has length -1"),
        (GOLDEN_IDX, b"", "holds 0 bytes but its index promises 6 tokens of 2 bytes = 12; it is cut short"),
        (GOLDEN_IDX, GOLDEN_BIN + b"\0\0", "14 bytes .* it is too long"),
    ],
)  # fmt: skip
def test_damage_is_refused_with_numbers(tmp_path: Path, idx: bytes, bin_: bytes, message: str) -> None:
    (tmp_path / "corpus.idx").write_bytes(idx)
    (tmp_path / "corpus.bin").write_bytes(bin_)
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "corpus")
    assert str(tmp_path / "corpus") in str(error.value)


@pytest.mark.parametrize("tokens", [[65536], [-1], [1.5]])
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, tokens: list[float]) -> None:
    with (
        pytest.raises(DataError, match="do not fit uint16"),
        IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer,
    ):
        writer.add_document(np.array(tokens))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("end", "left", "told"),
    [
        (".bin", 5, "ends at byte 5, and held 12 when it was opened: it was cut short meanwhile; copy"),
        (".idx", 0, "holds 0 bytes, and held 110 when it was opened: it was changed meanwhile; copy or make"),
    ],
)
def test_a_corpus_that_is_cut_short_while_it_is_read_is_an_error_and_no_signal(
    end: str, left: int, told: str, tmp_path: Path
) -> None:
    prefix = write(tmp_path / "corpus")
    indexed = IndexedDataset(prefix)
    indexed.require_whole_index()
    assert indexed.tokens[2:4].tolist() == [3, 65535] and len(indexed.tokens[6:9]) == 0
    os.truncate(f"{prefix}{end}", left)
    with pytest.raises(DataError, match=f"{prefix}{end} {told}"):
        indexed.require_whole_index()
        indexed.tokens[1:4]
