"""A new file has every byte that threads wrote to it, whichever way each part went."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from gptpar.checkpoint.data_file import MAX_COLLECTED_BYTES, MIN_DIRECT_BYTES, AlignedBuffers, DataFile
from gptpar.system.regions import PIECE_BYTES
from tests.pairs import every_pair


def write_parts(path: Path, sizes: list[int]) -> bytes:
    """Write parts of random bytes one after the other in the file, from four threads; returns the bytes."""
    random, buffers, file = Random(1), AlignedBuffers(4), DataFile(path)
    places = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    expected = random.randbytes(places[-1])
    file.reserve(0, len(expected))

    def write(number: int) -> None:
        place, size = places[number], sizes[number]
        with buffers.take(place, size) as buffer:
            memory = buffer.numpy()
            memory[:] = memoryview(expected)[place : place + size]
            file.write(place, memory.data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, random.sample(range(len(sizes)), len(sizes))))
    file.sync()
    file.close()
    return expected


SIZES = {
    "few bytes": [1, 7, 4096, 12],
    "mixed": [3, PIECE_BYTES, 100, MIN_DIRECT_BYTES + 5000, 8192, PIECE_BYTES - 1, MIN_DIRECT_BYTES - 1],
    "more than is collected": [MIN_DIRECT_BYTES - 1] * (2 * MAX_COLLECTED_BYTES // MIN_DIRECT_BYTES + 3),
    "nothing": [],
}


@every_pair(name=[*SIZES], direct=[True, False])
def test_every_byte_is_in_its_place(name: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    expected = write_parts(tmp_path / "file", SIZES[name])
    assert (tmp_path / "file").read_bytes() == expected
