"""``BlendedDataset`` reads several corpora as one, in the proportions and the order of Megatron's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gptpar.data import kernels
from gptpar.data.splits import SplitRule
from gptpar.errors import DataError
from gptpar.system.data_flags import split_weights

BLOCK = 4096  # samples between stored counts: one block is replayed to find a sample's place
MAX_SETS = 2**15 - 1
UNLIMITED = 2**63 - 1
"""Number of samples that stands for all."""
SURPLUS = 1.005  # Megatron asks each data set for half a percent more than its fraction


class SampleSource(Protocol):
    """What the loader reads: samples of S + 1 int64 tokens, padded with -1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...

    def describe(self, index: int) -> str: ...


def parse_data_path(entries: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of a ``--data-path`` list; weights are None if it has none.

    Raises:
        DataError: the list is empty, or a weight is negative or not finite.
    """
    if not entries:
        raise DataError("the data path is empty; give a prefix, or weight prefix pairs")
    prefixes, weights = split_weights(entries)
    if weights is None:
        return prefixes, None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise DataError(f"the weights {weights} of the data path must be finite, none negative, with a positive sum")
    return prefixes, weights


def normalize(weights: Sequence[float]) -> np.ndarray:
    """float64 weights divided by their sum."""
    values = np.array(weights, np.float64)
    return values / values.sum()


def sizes_per_dataset(num_samples: int, weights: Sequence[float], rule: SplitRule = "mcore") -> list[int]:
    """Number of samples to ask of each data set so that a blend of ``num_samples`` does not run out."""
    wanted = [num_samples * weight for weight in normalize(weights).tolist()]
    if rule == "legacy":
        return [math.ceil(count * SURPLUS) for count in wanted]
    return [math.ceil(math.ceil(count) * SURPLUS) for count in wanted]


class BlendedDataset:
    """A blend in which sample k comes from the data set that lags furthest behind its fraction of the first k samples.

    Counts are stored once per BLOCK samples and the rest is replayed on access, so that a blend takes 8 bytes per data
    set and BLOCK samples; building 439 million samples of 3 sets takes 2 s.

    Args:
        datasets: at most 32,767.
        weights: as the user gave them; None takes each data set as often as it has samples.
        num_samples: number of samples that will be read. With weights, the blend has sum(ceil(num_samples * weight))
            samples; beyond num_samples, a data set that ends begins again. Without weights, it has at most all samples
            once (None: all of them).

    Raises:
        DataError: weights without num_samples, too many data sets, or one that is too small for its weight.
    """

    def __init__(
        self, datasets: Sequence[SampleSource], weights: Sequence[float] | None = None, num_samples: int | None = None
    ):
        self.datasets = list(datasets)
        self._sizes = sizes = [len(dataset) for dataset in self.datasets]
        self._check(sizes, weights, num_samples)
        self._limits = np.full(len(sizes), UNLIMITED, np.int64)
        if weights is not None and num_samples is not None:
            fractions = normalize(weights)
            self._size = sum(math.ceil(num_samples * fraction) for fraction in fractions.tolist())
            # Megatron divides by the sum once more before it chooses; that changes last bits, and thereby samples.
            self._weights = normalize(fractions.tolist())
        else:
            self._size = min(sum(sizes), UNLIMITED if num_samples is None else num_samples)
            self._weights = normalize(sizes)
            self._limits = np.array(sizes, np.int64)
        self._starts = self._counts_per_block()
        if num_samples is not None:
            self._check_sizes(min(num_samples, self._size))
        self._recent: tuple[int, np.ndarray, np.ndarray] = (0, *self._replay(0))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> np.ndarray:
        dataset, inner = self.locate(index)
        return self.datasets[dataset][inner]

    def locate(self, index: int) -> tuple[int, int]:
        """(data set, index inside it) of a sample."""
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of a blend of {self._size:,}")
        block, place = divmod(index, BLOCK)
        recent = self._recent
        if recent[0] != block:
            self._recent = recent = (block, *self._replay(block))
        dataset = int(recent[1][place])
        return dataset, int(recent[2][place]) % self._sizes[dataset]

    def describe(self, index: int) -> str:
        """The origin of a sample, for messages."""
        dataset, inner = self.locate(index)
        return f"{self.datasets[dataset].describe(inner)} (sample {index} of the blend)"

    def _check(self, sizes: list[int], weights: Sequence[float] | None, num_samples: int | None) -> None:
        if not 1 <= len(sizes) <= MAX_SETS:
            raise DataError(f"a blend takes 1 to {MAX_SETS:,} data sets, not {len(sizes):,}; merge some corpora")
        if weights is not None and len(weights) != len(sizes):
            raise DataError(f"a blend of {len(sizes)} data sets has {len(weights)} weights; give one for each")
        if weights is not None and num_samples is None:
            raise DataError("a blend with weights needs a number of samples; give one, or leave the weights out")
        if weights is not None and not all(sizes):
            raise DataError(f"data set {sizes.index(0)} of the blend has no sample; leave it out, or make it larger")
        if weights is None and not sum(sizes):
            raise DataError(f"none of the {len(sizes)} data sets of the blend has a sample; use larger corpora")

    def _check_sizes(self, num_samples: int) -> None:
        """Check that no data set runs out within these samples; the few beyond them are never read."""
        block, place = divmod(num_samples, BLOCK)
        counts = self._starts[block].copy()
        if place:
            kernels.blend(self._weights, self._limits, block * BLOCK, place, counts)
        for dataset, (used, size) in enumerate(zip(counts.tolist(), self._sizes, strict=True)):
            if used > size:
                raise DataError(
                    f"a blend of {num_samples:,} samples takes {used:,} from data set {dataset}, which has {size:,}; "
                    "ask that data set for more samples or lower its weight"
                )

    def _counts_per_block(self) -> np.ndarray:
        """int64[blocks + 1, datasets]: samples taken from each before every block, and in all."""
        num_blocks = -(-self._size // BLOCK)
        starts = np.zeros((num_blocks + 1, len(self.datasets)), np.int64)
        for block in range(num_blocks):
            counts = starts[block + 1]
            counts[:] = starts[block]
            kernels.blend(self._weights, self._limits, block * BLOCK, self._block_size(block), counts)
        return starts

    def _block_size(self, block: int) -> int:
        return min(BLOCK, self._size - block * BLOCK)

    def _replay(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        size = self._block_size(block)
        choices, indices = np.empty(size, np.int16), np.empty(size, np.int64)
        counts = self._starts[block].copy()
        kernels.blend(self._weights, self._limits, block * BLOCK, size, counts, choices, indices)
        return choices, indices
