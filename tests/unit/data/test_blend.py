"""Blends are Megatron's, the same from the kernel and from the plain loop."""

import math
import zlib
from collections.abc import Iterable

import numpy as np
import pytest

from gptpar.data import kernels
from gptpar.data.blend import BLOCK, BlendedDataset, normalize, parse_data_path, sizes_per_dataset


def sets_of(sizes: Iterable[int]) -> list[list[tuple[int, int]]]:
    """Sample i of set j is (j, i)."""
    return [[(j, i) for i in range(size)] for j, size in enumerate(sizes)]


def plain(weights: np.ndarray, size: int, limits: list[int] | None = None) -> list[tuple[int, int]]:
    """(set, index inside it) of each sample, by the loop that is taken without a compiler."""
    choices, indices = np.zeros(size, np.int16), np.zeros(size, np.int64)
    room = np.array(limits or [size] * len(weights))
    placed = kernels._blend_plain(weights, room, 0, size, np.zeros(len(weights), np.int64), choices, indices)
    return list(zip(choices[:placed].tolist(), indices[:placed].tolist(), strict=True))


def located(blend: BlendedDataset) -> list[tuple[int, int]]:
    return [blend.locate(i) for i in range(len(blend))]


@pytest.mark.parametrize(
    "weights, n",
    [
        ([0.3, 0.7], 1000),
        ([1, 2, 3], 2 * BLOCK + 17),
        ([0.1] * 10, 3 * BLOCK),  # ties everywhere
        ([0.0, 1.0], 50),
        (np.random.RandomState(0).rand(40).tolist(), 3000),
    ],
)
def test_weighted_blends_are_those_of_the_plain_loop(weights: list[float], n: int) -> None:
    shares = normalize(weights).tolist()
    # one sample at least, as every corpus has: the rule's first tie gives even a weight of 0 a sample
    blend = BlendedDataset(sets_of(max(size, 1) for size in sizes_per_dataset(n, weights)), weights, n)
    assert len(blend) == sum(math.ceil(n * share) for share in shares)
    expected = plain(normalize(shares), len(blend))
    assert located(blend) == expected
    for i in (len(blend) - 1, 0, len(blend) // 2):  # any order of access
        assert blend[i] == expected[i]
    with pytest.raises(IndexError):
        blend.locate(len(blend))


# (weights, samples asked for, length, CRC-32 of the int16 data sets chosen) of megatron-core 0.19.2. Where the weights
# are divided by their sum once for both, or twice for both, at least one of the two numbers is another.
EDGE_CASES = [
    ([0.91, 0.26], 544, 545, 522206150),
    ([0.203, 0.866, 0.23], 300, 302, 1979056678),
    ([0.58, 0.528, 0.35, 1.0, 0.572], 775, 778, 1569788335),
    # whole percents and round numbers of samples, which people write, are the worst: 2 % of their lengths differ
    ([0.08, 0.9, 0.89, 0.75, 0.4, 0.71, 0.88, 0.83, 0.13, 0.79, 0.13, 0.01], 3900, 3912, 751825627),
    ([0.9, 0.9, 0.66, 0.54, 0.78, 0.95, 0.16, 0.62, 0.38, 0.06, 0.05], 600, 610, 3427119463),
]


@pytest.mark.parametrize("weights, n, length, crc", EDGE_CASES)
def test_last_bits_of_the_weights_are_megatrons(weights: list[float], n: int, length: int, crc: int) -> None:
    blend = BlendedDataset(sets_of(sizes_per_dataset(n, weights)), weights, n)
    assert len(blend) == length
    assert zlib.crc32(np.array([j for j, _ in located(blend)], "<i2").tobytes()) == crc


def test_each_set_has_half_a_percent_more_than_its_share() -> None:
    """2,500.25 and 7,500.75 samples; Megatron rounds them up before that, too, and its older versions did not."""
    assert sizes_per_dataset(10_001, [1, 3]) == [2514, 7539]
    assert sizes_per_dataset(10_001, [1, 3], "legacy") == [2513, 7539]


def test_without_weights_each_set_is_read_once() -> None:
    sizes = [5, 0, 17, 3]
    blend = BlendedDataset(sets_of(sizes))
    expected = plain(normalize(sizes), 30, sizes)
    assert located(blend) == expected
    assert sorted(expected) == [(j, i) for j, size in enumerate(sizes) for i in range(size)]


@pytest.mark.parametrize(
    "entries, prefixes, weights",
    [
        (["a"], ["a"], None),
        (["0.3", "a", "0.7", "b"], ["a", "b"], [0.3, 0.7]),
        (["1", "a", "x", "b"], ["1", "a", "x", "b"], None),
        (["2", "3"], ["3"], [2.0]),
    ],
)
def test_data_paths(entries: list[str], prefixes: list[str], weights: list[float] | None) -> None:
    assert parse_data_path(entries) == (prefixes, weights)
