"""GPTDataset against a plain-loop reference of Megatron's rules, written from their description alone."""

import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptpar.data import gpt_dataset, kernels
from gptpar.data.gpt_dataset import ARRAYS, GPTDataset
from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter
from gptpar.errors import DataError, NativeBuildError
from tests.pairs import in_turns


def corpus(folder: Path, lengths: list[int], dtype: str = "int32") -> IndexedDataset:
    """Sequences of the given lengths, zero allowed, holding the tokens 100, 101, ..."""
    prefix, start = folder / "corpus", 100
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for length in lengths:
            if length:
                writer.add_document(np.arange(start, start + length))
            else:  # a sequence without tokens, which other writers can make
                writer._extend_index(np.array([0]), np.array([writer._num_sequences + 1]))
            start += length
    return IndexedDataset(prefix)


def reference(lengths: list[int], n: int | None, seq: int, seed: int, x: int) -> tuple:
    """(documents, sample index rows, shuffle index, separate_last), as plain loops."""
    tokens = sum(lengths)
    epochs = 1
    while n is not None and epochs * tokens < n * seq + x:
        epochs += 1
    separate, sans = False, 0
    if epochs > 1:
        sans = ((epochs - 1) * tokens - x) // seq
        per_epoch = (tokens - x) // seq
        assert 0 <= n - sans <= per_epoch + 1
        separate = n - sans < int(0.80 * per_epoch)
    random = np.random.RandomState(seed)
    ids = np.arange(len(lengths), dtype=np.int32)
    if separate:
        first, last = np.tile(ids, epochs - 1), ids.copy()
        random.shuffle(first)
        random.shuffle(last)
        documents = np.concatenate([first, last])
    else:
        documents = np.tile(ids, epochs)
        random.shuffle(documents)
    count = (epochs * tokens - x) // seq
    rows, place, offset = [(0, 0)], 0, 0
    while len(rows) <= count:
        remaining = seq + x
        while remaining:
            length = lengths[documents[place]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - x
                remaining = 0
            else:
                place, offset = place + 1, 0
        rows.append((place, offset))
    cut = sans if separate else count
    parts = [np.arange(cut, dtype=np.uint32), np.arange(cut, count, dtype=np.uint32)]
    for part in parts[: 2 if separate else 1]:
        random.shuffle(part)
    return documents, rows, np.concatenate(parts), separate


def reference_sample(lengths: list[int], documents: np.ndarray, rows: list, sample: int, seq: int, x: int) -> list[int]:
    starts = np.cumsum([0, *lengths]) + 100
    (place, offset), (last_place, last_offset) = rows[sample], rows[sample + 1]
    text: list[int] = []
    while place < last_place:
        start = starts[documents[place]]
        text += range(start + offset, start + lengths[documents[place]])
        place, offset = place + 1, 0
    start = starts[documents[place]]
    text += range(start + offset, start + last_offset + x)
    return text + [-1] * (seq + 1 - len(text))


SHAPES = [
    ([10], 50),
    ([4, 4, 4, 1], 3),
    ([8, 8, 8, 8], 40),
    ([0, 5, 0, 0, 7, 0, 3, 0], 30),
    ([100, 3, 50, 1, 1, 20], 41),  # last epoch separate
    ([100, 3, 50, 1, 1, 20], 80),  # not separate
    (list(range(1, 60)), 5000),
    ([3] * 300, 2500),  # ids beyond uint8
    ([5, 6] * 1500, None),  # several blocks
]


@pytest.mark.parametrize(("shape", "sample"), [*zip(SHAPES, cycle([(4, 1), (4, 0), (7, 1), (1, 1)]))])
def test_indices_and_samples_are_megatrons(tmp_path: Path, shape: Any, sample: tuple[int, int]) -> None:
    (lengths, n), (seq, x) = shape, sample
    documents, rows, shuffle, separate = reference(lengths, n, seq, 1234, x)
    dataset = GPTDataset(corpus(tmp_path, lengths), (0, len(lengths)), n, seq, 1234, add_extra_token=x)
    assert dataset.plan.separate_last is separate
    assert np.array_equal(dataset._documents, documents)
    assert np.array_equal(dataset._shuffle, shuffle) and dataset._shuffle.dtype == np.uint32
    assert len(dataset) == len(rows) - 1 >= (n or 0)
    assert [dataset.boundary(k) for k in range(len(rows))] == rows
    for i in range(0, len(dataset), max(1, len(dataset) // 50)):
        sample = dataset[i]
        assert sample.dtype == np.int64 and sample.shape == (seq + 1,)
        assert sample.tolist() == reference_sample(lengths, documents, rows, int(shuffle[i]), seq, x)


def test_too_little_data_is_refused_with_numbers(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, [3, 3, 3])
    with pytest.raises(DataError, match=r"\(valid\): 10 samples .* sequences \[3, 3\) of 3 hold no token"):
        GPTDataset(indexed, (3, 3), 10, 4, 1, split_name="valid")
    with pytest.raises(DataError, match=r"one sample takes 9 \+ 1 tokens, but its 3 sequences hold only 9"):
        GPTDataset(indexed, (0, 3), None, 9, 1)
    assert len(GPTDataset(indexed, (3, 3), 0, 4, 1)) == 0
    with pytest.raises(IndexError, match="sample 2 of 2"):
        GPTDataset(indexed, (0, 3), None, 4, 1)[2]


@in_turns(n=[0, 1, 256, 257, 65537], dtype=[np.uint8, np.uint16, np.uint32, np.int32, np.int64])
def test_native_shuffle_is_numpys(n: int, dtype: type) -> None:
    assert kernels._library() is not None
    ours, theirs = np.random.RandomState(n), np.random.RandomState(n)
    ours.standard_normal(3), theirs.standard_normal(3)  # a cached Gauss and a place inside the state block survive
    values = np.arange(n).astype(dtype)
    expected = values.copy()
    for _ in range(2):
        kernels.shuffle_in_place(values, ours)
        theirs.shuffle(expected)
    assert np.array_equal(values, expected)
    assert ours.standard_normal(4).tolist() == theirs.standard_normal(4).tolist()


def test_without_a_compiler_one_warning_and_the_same_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise NativeBuildError("no compiler")

    indexed = corpus(tmp_path, [7, 9, 4])
    native = GPTDataset(indexed, (0, 3), 50, 4, 3)
    kernels._library.cache_clear()
    monkeypatch.setattr(kernels.native, "load", refuse)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain = GPTDataset(indexed, (0, 3), 50, 4, 3)
    finally:
        kernels._library.cache_clear()
    assert [str(warning.message) for warning in caught] == [
        "data indices are built in Python, the same but slower: no compiler"
    ]
    assert np.array_equal(plain._documents, native._documents) and np.array_equal(plain._shuffle, native._shuffle)


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_dataset, "MIN_CACHED_ENTRIES", 0)


def samples(dataset: GPTDataset) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset))]


def cached(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


def test_the_cache_is_read_again_and_never_for_other_data(tmp_path: Path, always_cached: None) -> None:
    indexed = corpus(tmp_path, [7, 9, 4])
    first = GPTDataset(indexed, (0, 3), 50, 4, 3)
    folder = tmp_path / "cache"
    files = cached(folder)
    assert len(files) == 3 and isinstance(first._shuffle, np.memmap)
    assert samples(GPTDataset(indexed, (0, 3), 50, 4, 3)) == samples(first)
    assert cached(folder) == files
    for change in ({"seed": 4}, {"num_samples": 60}, {"seq_length": 5}, {"sequence_range": (0, 2)}):
        arguments = {"sequence_range": (0, 3), "num_samples": 50, "seq_length": 4, "seed": 3} | change
        before = len(cached(folder))
        GPTDataset(indexed, **arguments)
        assert len(cached(folder)) == before + 3, change
    again = corpus(tmp_path, [7, 4, 9])  # tokenized anew under the same name, with the same number of tokens
    replaced = GPTDataset(again, (0, 3), 50, 4, 3)
    rows = reference([7, 4, 9], 50, 4, 3, 1)[1]
    assert [replaced.boundary(k) for k in range(len(rows))] == rows
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


def spoil(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(whole[:-1])
    elif kind == "other dtype":
        np.save(path, np.load(path).astype(np.int16))


@pytest.mark.parametrize(("kind", "name"), [*zip(["empty", "cut", "other dtype"], ARRAYS, strict=True)])
def test_a_damaged_cache_is_told_and_built_again(tmp_path: Path, always_cached: None, name: str, kind: str) -> None:
    indexed = corpus(tmp_path, [7, 9, 4])
    expected = samples(GPTDataset(indexed, (0, 3), 50, 4, 3))
    (path,) = (tmp_path / "cache").glob(f"*-{name}.npy")
    spoil(path, kind)
    with pytest.warns(UserWarning, match=rf"the index cache .* is damaged \(\w+-{name}.npy .*built again") as told:
        assert samples(GPTDataset(indexed, (0, 3), 50, 4, 3)) == expected
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samples(GPTDataset(indexed, (0, 3), 50, 4, 3)) == expected
