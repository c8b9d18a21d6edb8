"""Counts and sizes with units."""

import argparse

import pytest

from gptpar.config.flags import parse_flags
from gptpar.system.quantities import positive_gib, read_bytes, read_count


@pytest.mark.parametrize(
    ("text", "count"), [("1.5B", 1_500_000_000), ("2k", 2000), ("3T", 3 * 10**12), ("5e8", 500_000_000), ("7", 7)]
)
def test_counts(text: str, count: int) -> None:
    assert read_count(text) == count
    assert parse_flags(["--train-tokens", text, "--train-samples", text]).typed == {
        "batch.train_tokens": count,
        "batch.train_samples": count,
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80 gib", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("512B", 512)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_bytes(text) == size
    assert positive_gib(text) == size / 2**30


def test_what_is_no_count_and_no_size() -> None:
    for text in ("", "1.5", "inf", "-1K", "1e30"):
        with pytest.raises(ValueError):
            read_count(text)
    for text in ("", "80Gi", "-3", "nanGB"):
        with pytest.raises(argparse.ArgumentTypeError):
            positive_gib(text)
