"""The three data sets of a run from plain arguments."""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptpar.data.blend import BlendedDataset
from gptpar.data.build import MockDataset, SampleSpec, build_train_valid_test, unigram_entropy
from gptpar.data.gpt_dataset import GPTDataset
from gptpar.errors import DataError
from tests.unit.data.corpora import write_corpus

SPEC = SampleSpec(seq_length=8, seed=1)


def corpus(prefix: Path, first: int) -> str:
    """20 documents of 50 tokens, which all equal first + document number."""
    write_corpus(prefix, [[first + document] * 50 for document in range(20)])
    return str(prefix)


def tokens(dataset: GPTDataset | BlendedDataset) -> set[int]:
    return {token for i in range(len(dataset)) for token in dataset[i].tolist()}


def test_a_single_corpus_is_split(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 100)
    train, valid, test = build_train_valid_test((300, 5, 0), SPEC, data_path=[prefix], split="80,10,10")
    assert tokens(train) == set(range(100, 116)) and tokens(valid) == {116, 117} and test is None
    assert len(train) >= 300 and train.split_name == "train" and valid.split_name == "valid"
    assert train.indexed is valid.indexed


def test_an_empty_split_that_is_needed_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 100)
    arguments = {"data_path": [prefix], "split": "949,50,1"}
    with pytest.raises(DataError, match=r"\(test\): 4 samples are asked for, but its sequences \[20, 20\) of 20"):
        build_train_valid_test((10, 4, 4), SPEC, **arguments)
    assert build_train_valid_test((10, 4, 0), SPEC, **arguments)[2] is None
    assert build_train_valid_test((10, 4, 4), SPEC, data_path=[prefix], split="90,10")[2] is None


def test_a_weighted_blend(tmp_path: Path) -> None:
    path = ["3", corpus(tmp_path / "a", 100), "1", corpus(tmp_path / "b", 200)]
    train, valid, _ = build_train_valid_test((100, 10, 0), SPEC, data_path=path, split="90,10")
    assert isinstance(train, BlendedDataset) and len(train) == 100 and len(valid) == 8 + 3
    sources = [train.locate(i)[0] for i in range(100)]
    assert sources.count(0) == 75 and sources[:4] == [0, 1, 0, 0]
    assert all(train[i].min() // 100 == 1 + source for i, source in enumerate(sources))
    with pytest.raises(DataError, match="needs a number of samples"):
        build_train_valid_test((None, 0, 0), SPEC, data_path=path)


@pytest.mark.parametrize(
    "n, same_as_without_weight, crc",  # the CRC-32 of the samples' first tokens, as int32, is megatron-core 0.19.2's
    [
        (124, False, 2812304083),  # one epoch holds 124; half a percent more takes two
        (224, True, 1398343451),  # 80 % of the last epoch
        (225, True, 3113611543),
        (249, False, 595884075),  # two epochs hold 249
    ],
)
def test_one_corpus_with_a_weight_is_megatrons_blend_of_one(
    tmp_path: Path, n: int, same_as_without_weight: bool, crc: int
) -> None:
    write_corpus(tmp_path / "a", np.arange(1000).reshape(20, 50))
    prefix = str(tmp_path / "a")

    def order(**path: Any) -> list[int]:
        train = build_train_valid_test((n, 0, 0), SPEC, **path)[0]
        assert len(train) == n or "1.0" not in path.get("data_path", ())
        return [int(train[i][0]) for i in range(n)]

    weighted = order(data_path=["1.0", prefix], split="1")
    assert zlib.crc32(np.array(weighted, "<i4").tobytes()) == crc
    plain = order(data_path=[prefix], split="1")
    assert (weighted == plain) == same_as_without_weight
    # with a path for each split Megatron leaves the weight of a single corpus out of account
    assert order(split_data_paths=(["1.0", prefix], None, None)) == plain


def test_mock_samples_are_functions_of_seed_split_and_index() -> None:
    train, valid, test = build_train_valid_test((5, 3, 0), SPEC, mock_vocab_size=50)
    assert (len(train), len(valid), test) == (5, 3, None)
    again = MockDataset(5, 8, 50, seed=1)
    for i in range(5):
        sample = train[i]
        assert sample.tolist() == again[i].tolist() and sample.shape == (9,) and sample.dtype == np.int64
        assert sample.min() >= 0 and sample.max() < 50 and len(set(np.diff(sample) % 50)) == 1
    others = [MockDataset(5, 8, 50, seed=2), MockDataset(5, 8, 50, seed=1, split=1)]
    assert all(any(other[i].tolist() != train[i].tolist() for i in range(5)) for other in others)
    with pytest.raises(IndexError):
        train[5]


def test_unigram_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptpar.data.build.ENTROPY_CHUNK", 7)  # several chunks, ids growing between them
    assert unigram_entropy(write_corpus(tmp_path / "a", [[3 + n] * 50 for n in range(16)])) == pytest.approx(
        math.log(16)
    )
    uneven = write_corpus(tmp_path / "b", [[1, 1, 1, 5]])
    assert unigram_entropy(uneven) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert unigram_entropy(write_corpus(tmp_path / "c", [[]])) == 0
