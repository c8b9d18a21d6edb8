"""Pickles of a few bytes whose reading would take all memory, time without end or the C stack."""

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.distcp import ALLOWED
from gptpar.exchange.files.safe_pickle import load_pickle, load_torch_file, load_torch_part
from gptpar.exchange.files.weight_files import open_torch

NESTED = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."
"""{((((...)))): 1}: its hash overflows the C stack."""
DOUBLED = b"\x80\x02}K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"K\x01s."
"""t = (t, t), sixty times: its hash takes 2**60 steps."""
LONG = b"\x80\x02}(" + b"K\x01" * 5000 + b"tK\x01s."
TOLD = "is refused: a tuple of it has more than 4,096 elements or 100 tuples in it"


def archive(content: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for name, data in (("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{name}", data)
    return memory.getvalue()


def old_file(content: bytes) -> bytes:
    before = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(one, 2) for one in before) + content


def bare(path: Path) -> object:
    return load_pickle(path, ALLOWED)


def part(path: Path) -> object:
    return load_torch_part(path, 0, path.stat().st_size)


@pytest.mark.parametrize("content", [NESTED, DOUBLED, LONG], ids=["nested", "doubled", "long"])
@pytest.mark.parametrize(
    ("wrap", "load"),
    [(bytes, bare), (archive, load_torch_file), (archive, part), (old_file, load_torch_file)],
    ids=["bare", "archive", "part of a file", "old format"],
)
def test_tuples_whose_hash_takes_long_are_refused(
    wrap: Callable[[bytes], bytes], load: Callable[[Path], object], content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "w").write_bytes(wrap(content))
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'w'} {TOLD}")):
        load(tmp_path / "w")


def test_many_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    values = torch.ones(100_000)
    torch.save({"a": values, "tied": values}, tmp_path / "tied.bin")
    assert open_torch(tmp_path / "tied.bin").values.keys() == {"a", "tied"}
    torch.save({str(number): values for number in range(10)}, tmp_path / "many.bin")
    with pytest.raises(CheckpointError, match=r"10 tensors claim 4,000,000 bytes, and the file has 4\d\d,\d\d\d: they"):
        open_torch(tmp_path / "many.bin")


def test_what_is_in_real_files_is_read(tmp_path: Path) -> None:
    state = {"rng": (3, tuple(range(625)), None), ("a", 1): [torch.Size([2, 3])], "weight": torch.ones(2, 3)}
    for old in (False, True):
        torch.save(state, tmp_path / "w", _use_new_zipfile_serialization=not old)
        assert load_torch_file(tmp_path / "w")["rng"] == state["rng"]
