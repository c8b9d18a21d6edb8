"""CRC-32 of memory: zlib's numbers, by the helper and without it."""

import zlib
from pathlib import Path
from random import Random

import pytest
import torch

from gptpar.system import crc32 as room
from gptpar.system.crc32 import copy_with_crc32, crc32, read_with_crc32

SIZES = (0, 1, 15, 17, 64, 79, 129, 4096, 100_003)


@pytest.fixture(params=["with the helper", "without"])
def _helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(room, "_library", lambda: None)


@pytest.mark.usefixtures("_helper")
@pytest.mark.parametrize("size", SIZES)
def test_any_bytes_at_any_address_have_zlibs_number(size: int) -> None:
    random = Random(size)
    memory = torch.frombuffer(bytearray(random.randbytes(size + 40)), dtype=torch.uint8)
    for start in (0, 1, 7, 8, 16, 33):
        data, before = memory[start : start + size], random.getrandbits(32)
        assert crc32(data) == zlib.crc32(data.numpy().tobytes())
        assert crc32(data, before) == zlib.crc32(data.numpy().tobytes(), before)


@pytest.mark.usefixtures("_helper")
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_has_the_bytes_and_their_number_and_touches_no_others(size: int) -> None:
    memory = torch.frombuffer(bytearray(Random(size).randbytes(size + 40)), dtype=torch.uint8)
    for start, place in ((0, 0), (1, 0), (0, 4), (7, 15), (16, 33)):
        source, target = memory[start : start + size], torch.full((size + 80,), 7, dtype=torch.uint8)
        assert copy_with_crc32(target[place : place + size], source) == zlib.crc32(source.numpy().tobytes())
        assert torch.equal(target[place : place + size], source)
        assert (target[:place] == 7).all() and (target[place + size :] == 7).all()


@pytest.mark.usefixtures("_helper")
@pytest.mark.parametrize("part_bytes", [1, 1000])
def test_what_is_read_is_the_files_and_has_zlibs_number(tmp_path: Path, part_bytes: int) -> None:
    path, text = tmp_path / "file", Random(part_bytes).randbytes(5000)
    path.write_bytes(text)
    with path.open("rb") as file:
        for place, size, before in ((0, 5000, 0), (7, 1234, 99), (4990, 64, 0), (6000, 8, 5), (3, 0, 7)):
            target = torch.zeros(size, dtype=torch.uint8)
            there = text[place : place + size]
            expected = len(there), zlib.crc32(there, before)
            assert read_with_crc32(file.fileno(), place, target, before, part_bytes) == expected
            assert target.numpy().tobytes() == there + bytes(size - len(there))
