"""Processes that ask for the same large index at once: one builds it, all read the same bytes."""

import fcntl
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

from gptpar.data import gpt_dataset
from gptpar.data.gpt_dataset import ARRAYS, GPTDataset
from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter
from tests.forked import FORKED

NUM_PROCESSES = 3
NUM_SAMPLES = 1000


def load(prefix: str, locks: bool) -> tuple[list[str], int]:
    """(hash of each array, how often this process built them, which takes until the others ask for them)."""
    gpt_dataset.MIN_CACHED_ENTRIES = 0
    if not locks:
        fcntl.flock = _refuse
    builds = 0
    build_index = gpt_dataset.build_index

    def counted(*arguments: object) -> dict:
        nonlocal builds
        builds += 1
        time.sleep(0.5)
        return build_index(*arguments)

    gpt_dataset.build_index = counted
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, (0, len(indexed)), NUM_SAMPLES, 8, 1234)
    arrays = [getattr(dataset, f"_{name}") for name in ARRAYS]
    return [hashlib.sha256(array).hexdigest() for array in arrays], builds


def _refuse(*_: object) -> None:
    raise OSError("no locks available")


@pytest.mark.parametrize("locks", [True, False])
def test_concurrent_builds_agree(tmp_path: Path, locks: bool) -> None:
    prefix = tmp_path / "corpus"
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(10):
            writer.add_document(np.arange(10))
    with FORKED.Pool(NUM_PROCESSES) as pool:
        results = pool.starmap(load, [(str(prefix), locks)] * NUM_PROCESSES, chunksize=1)
    assert len({tuple(hashes) for hashes, _ in results}) == 1
    builds = sum(count for _, count in results)
    assert builds == 1 if locks else 1 <= builds <= NUM_PROCESSES

    files = sorted(path.name.partition("-")[2] for path in (tmp_path / "cache").glob("*.npy"))
    assert files == sorted(f"{name}.npy" for name in ARRAYS)
    assert not list((tmp_path / "cache").glob("*.tmp"))

    indexed = IndexedDataset(prefix)  # the same in memory, for so few are not cached
    alone = GPTDataset(indexed, (0, len(indexed)), NUM_SAMPLES, 8, 1234)
    assert [hashlib.sha256(getattr(alone, f"_{name}")).hexdigest() for name in ARRAYS] == results[0][0]
