"""Pickles of other programs: what would run a command, take all memory, time without end or the C stack is refused."""

import io
import os
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.distcp import ALLOWED
from gptpar.exchange.files.safe_pickle import LeftOut, load_pickle, load_torch_file, load_torch_part
from gptpar.exchange.files.weight_files import open_torch
from tests.unit.exchange.hf_models import refusal, save_theirs
from tests.unit.exchange.megatron_models import GPT2, Harm, arguments

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


@pytest.mark.parametrize(
    ("wrap", "load"),
    [
        (bytes, lambda path: load_pickle(path, ALLOWED)),
        (archive, load_torch_file),
        (archive, lambda path: load_torch_part(path, 0, path.stat().st_size)),
        (old_file, load_torch_file),
    ],
    ids=["bare", "archive", "part of a file", "old format"],
)
def test_tuples_whose_hash_takes_long_are_refused(
    wrap: Callable[[bytes], bytes], load: Callable[[Path], object], tmp_path: Path
) -> None:
    for content in (NESTED, DOUBLED, LONG):
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


def test_what_is_in_real_files_is_read_but_for_objects_of_their_programs(tmp_path: Path) -> None:
    state = {"rng": (3, tuple(range(625)), None), ("a", 1): [torch.Size([2, 3])], "weight": torch.ones(2, 3)}
    torch.save(state, tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.save(state | {"args": Namespace(a=1, rng=np.arange(3))}, tmp_path / "new")
    for name in ("old", "new"):
        found = load_torch_file(tmp_path / name)
        assert found["rng"] == state["rng"] and torch.equal(found["weight"], torch.ones(2, 3))
    assert found["args"].a == 1 and isinstance(found["args"].rng, LeftOut)


def test_a_file_that_names_another_function_is_refused(tmp_path: Path) -> None:
    """Torch itself blocks those of ``os``, not these."""
    torch.save({"w": torch.ones(2), "model": Harm(str(tmp_path / "harmed"), os.path.basename)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is refused: reading it would call posixpath.basename"):
        load_torch_file(tmp_path / "a.pt")
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("name", ["iter_0000001/mp_rank_00/model_optim_rng.pt", "pytorch_model.bin"])
def test_a_checkpoint_whose_reading_would_run_a_command_is_refused(name: str, tmp_path: Path) -> None:
    if name == "pytorch_model.bin":
        save_theirs(tmp_path / "theirs", "GPT-2")
        (tmp_path / "theirs/model.safetensors").unlink()
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    harm = {"args": arguments(GPT2), "model": Harm(f"touch {tmp_path / 'harmed'}")}
    for zipped in (True, False):
        torch.save(harm, path, _use_new_zipfile_serialization=zipped)
        assert re.search(r"is refused: reading it would call \w+\.system, which may", refusal(tmp_path))
    path.write_bytes(pickle.dumps(harm))
    assert "is no file of torch.save, or damaged" in refusal(tmp_path)
