"""Builds training, validation and test data from plain arguments, and synthetic data (``MockDataset``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptpar.data.blend import BlendedDataset, SampleSource, parse_data_path, sizes_per_dataset
from gptpar.data.gpt_dataset import GPTDataset
from gptpar.data.indexed import IndexedDataset, negative_token
from gptpar.data.splits import SplitRule, parse_split
from gptpar.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")
ENTROPY_CHUNK = 1 << 22
"""Number of tokens that are counted at a time."""
Sources = tuple[SampleSource | None, SampleSource | None, SampleSource | None]


@dataclass(frozen=True)
class SampleSpec:
    """What all splits have in common: length S, seed, and the folder of large indices (see GPTDataset)."""

    seq_length: int
    seed: int
    add_extra_token: int = 1
    cache_dir: str | Path | None = None


class MockDataset:
    """Samples without a corpus that a model can learn: tokens count up by 1 to 4, modulo the vocabulary's size.

    A sample is a function of (seed, split, index) alone.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int, split: int = 0):
        self._num_samples, self._seq_length, self._vocab_size = num_samples, seq_length, vocab_size
        self._seed, self._split = seed, split

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"mock sample {index} of {self._num_samples:,}")
        random = np.random.default_rng((self._seed, self._split, index))
        start, step = random.integers(self._vocab_size), random.integers(1, 5)
        return (start + step * np.arange(self._seq_length + 1, dtype=np.int64)) % self._vocab_size

    def describe(self, index: int) -> str:
        return f"sample {index} of the mock data ({SPLIT_NAMES[self._split]})"


def build_train_valid_test(
    num_samples: Sequence[int | None],
    spec: SampleSpec,
    *,
    data_path: Sequence[str] | None = None,
    split_data_paths: Sequence[Sequence[str] | None] = (None, None, None),
    split: str = "969,30,1",
    split_rule: SplitRule = "mcore",
    mock_vocab_size: int | None = None,
) -> Sources:
    """The three data sets of a run; each is None if it needs no samples or has no data.

    Args:
        num_samples: number of samples of train, valid and test; None: one pass over the data. Several corpora without
            weights are never repeated, so they may give fewer.
        spec: what the three have in common.
        data_path: one list of prefixes, or of weight prefix pairs, cut into three by ``split``.
        split_data_paths: three such lists instead, each used whole; None for a split without data.
        split: weights of train, valid and test, such as "969,30,1".
        split_rule: Megatron's present ("mcore") or former ("legacy") rule for ranges and blend sizes.
        mock_vocab_size: make up samples with this vocabulary instead of reading a corpus.

    Raises:
        DataError: there is no source of data, or more than one, or a source cannot give the samples.
    """
    given = (data_path is not None) + any(path is not None for path in split_data_paths) + (mock_vocab_size is not None)
    if given != 1:
        raise DataError(
            f"{given} sources of data are given; give one of --data-path, --train/valid/test-data-path and --mock-data"
        )
    built: list[SampleSource | None] = [None, None, None]
    corpora: dict[str, IndexedDataset] = {}  # shared by the splits
    for which, wanted in enumerate(num_samples):
        path = split_data_paths[which] if data_path is None else data_path
        if wanted == 0:
            continue
        if mock_vocab_size is not None:
            if wanted is None:
                raise DataError("mock data have no natural end; ask for a number of samples")
            built[which] = MockDataset(wanted, spec.seq_length, mock_vocab_size, spec.seed, which)
        elif path is not None:
            cut = split if data_path is not None else None
            built[which] = _Source(spec, which, cut, split_rule, corpora).build(path, wanted)
    return built[0], built[1], built[2]


def unigram_entropy(indexed: IndexedDataset) -> float:
    """Entropy of the token frequencies in nats: the loss of a model that knows these frequencies alone.

    Raises:
        DataError: a token is negative.
    """
    counts = np.zeros(0, np.int64)
    for start in range(0, len(indexed.tokens), ENTROPY_CHUNK):
        tokens = indexed.tokens[start : start + ENTROPY_CHUNK]
        if tokens.min() < 0:
            place = int(tokens.argmin())
            where = f"{indexed.bin_path}: token {start + place:,} of {len(indexed.tokens):,}"
            raise negative_token(where, int(tokens[place]))
        found = np.bincount(tokens)
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    frequencies = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(frequencies * np.log(frequencies)).sum())


@dataclass(frozen=True)
class _Source:
    """Builds one split from a list of prefixes; if ``cut`` is None, each corpus is used whole."""

    spec: SampleSpec
    which: int
    cut: str | None
    rule: SplitRule
    corpora: dict[str, IndexedDataset]

    def build(self, path: Sequence[str], wanted: int | None) -> SampleSource | None:
        prefixes, weights = parse_data_path(path)
        # Of one corpus with a weight, Megatron makes a blend (and asks it for half a percent more samples, which
        # changes their order), but not where each split has a path of its own.
        if len(prefixes) == 1 and (weights is None or wanted is None or self.cut is None):
            return self._single(prefixes[0], wanted)
        if weights is None:
            sets = [self._single(prefix, None) for prefix in prefixes]
        elif wanted is None:
            raise DataError("a data path with weights needs a number of samples; give one, or leave the weights out")
        else:
            sizes = sizes_per_dataset(wanted, weights, self.rule)
            sets = [self._single(prefix, size) for prefix, size in zip(prefixes, sizes, strict=True)]
        found = [dataset for dataset in sets if dataset is not None]
        if not found:
            return None
        if len(found) < len(sets):
            raise DataError(
                f"split {self.cut!r} leaves {SPLIT_NAMES[self.which]} without a sequence in {len(sets) - len(found)} "
                f"of {len(sets)} corpora; change --split, or leave the small corpora out"
            )
        return BlendedDataset(found, weights, wanted)

    def _single(self, prefix: str, wanted: int | None) -> GPTDataset | None:
        if prefix not in self.corpora:
            self.corpora[prefix] = IndexedDataset(prefix)
        indexed = self.corpora[prefix]
        whole = (0, len(indexed))
        part = whole if self.cut is None else parse_split(self.cut, len(indexed), self.rule)[self.which]
        if part is None:
            return None
        return GPTDataset(
            indexed,
            part,
            wanted,
            self.spec.seq_length,
            self.spec.seed,
            add_extra_token=self.spec.add_extra_token,
            split_name=SPLIT_NAMES[self.which],
            cache_dir=self.spec.cache_dir,
        )
