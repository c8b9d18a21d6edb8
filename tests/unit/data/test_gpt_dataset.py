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


def reference(lengths: list[int], n: int | None, seq: int, seed: int, x: int) -> tuple[list[list[int]], bool]:
    """All samples, and whether the last epoch is separate: windows of the documents laid end to end."""
    tokens = sum(lengths)
    epochs = 1
    while n is not None and epochs * tokens < n * seq + x:
        epochs += 1
    separate, sans = False, 0
    if n is not None and epochs > 1:
        sans = ((epochs - 1) * tokens - x) // seq
        per_epoch = (tokens - x) // seq
        separate = n - sans < int(0.80 * per_epoch)
    random = np.random.RandomState(seed)
    ids = np.arange(len(lengths), dtype=np.int32)
    order = [np.tile(ids, epochs - 1), ids.copy()] if separate else [np.tile(ids, epochs)]
    count = (epochs * tokens - x) // seq
    cut = sans if separate else count
    windows = [np.arange(cut, dtype=np.uint32), np.arange(cut, count, dtype=np.uint32)]
    for part in [*order, *windows[: len(order)]]:
        random.shuffle(part)
    starts = np.cumsum([0, *lengths]) + 100
    text = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in np.concatenate(order)])
    padding = [-1] * (1 - x)
    return [[*text[k * seq : (k + 1) * seq + x].tolist(), *padding] for k in np.concatenate(windows)], separate


def samples(dataset: GPTDataset) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset))]


SHAPES = [
    ([10], 50),
    ([4, 4, 4, 1], 3),
    ([8, 8, 8, 8], 40),
    ([0, 5, 0, 0, 7, 0, 3, 0], 30),
    ([100, 3, 50, 1, 1, 20], 41),  # last epoch separate
    ([100, 3, 50, 1, 1, 20], 80),  # not separate
    (list(range(1, 60)), 1000),
    ([3] * 300, 2500),  # ids beyond uint8
    ([5, 6] * 1500, None),  # several blocks
]


@pytest.mark.parametrize(("shape", "sample"), [*zip(SHAPES, cycle([(4, 1), (4, 0), (7, 1), (1, 1)]))])
def test_indices_and_samples_are_megatrons(tmp_path: Path, shape: Any, sample: tuple[int, int]) -> None:
    (lengths, n), (seq, x) = shape, sample
    expected, separate = reference(lengths, n, seq, 1234, x)
    dataset = GPTDataset(corpus(tmp_path, lengths), (0, len(lengths)), n, seq, 1234, add_extra_token=x)
    assert dataset.plan.separate_last is separate
    assert len(dataset) == len(expected) >= (n or 0)
    assert samples(dataset) == expected
    assert (dataset[0].dtype, dataset._shuffle.dtype) == (np.int64, np.uint32)


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
    assert samples(GPTDataset(again, (0, 3), 50, 4, 3)) == reference([7, 4, 9], 50, 4, 3, 1)[0]
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "other dtype": lambda path: np.save(path, np.load(path).astype(np.int16)),
}


@pytest.mark.parametrize(("kind", "name"), [*zip(DAMAGE, ARRAYS, strict=True)])
def test_a_damaged_cache_is_told_and_built_again(tmp_path: Path, always_cached: None, name: str, kind: str) -> None:
    indexed = corpus(tmp_path, [7, 9, 4])
    expected = samples(GPTDataset(indexed, (0, 3), 50, 4, 3))
    (path,) = (tmp_path / "cache").glob(f"*-{name}.npy")
    DAMAGE[kind](path)
    with pytest.warns(UserWarning, match=rf"the index cache .* is damaged \(\w+-{name}.npy .*built again") as told:
        assert samples(GPTDataset(indexed, (0, 3), 50, 4, 3)) == expected
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samples(GPTDataset(indexed, (0, 3), 50, 4, 3)) == expected
