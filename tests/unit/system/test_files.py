"""Small files of strangers are regular and bounded before they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gptpar.any_module.tags import _latest_tag
from gptpar.checkpoint.exchange.safe_pickle import load_torch_file, load_torch_part
from gptpar.checkpoint.exchange.safetensors_file import open_safetensors
from gptpar.data.tokenizer.base import TokenizerBase
from gptpar.errors import CheckpointError, TokenizerError
from gptpar.system.files import read_regular
from gptpar.training.exchange.hf_folder import read_json


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_hole(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


READERS: dict[str, Callable[[Path], object]] = {
    "JSON": read_json,
    "safetensors": open_safetensors,
    "torch.save": load_torch_file,
    "a part of it": lambda path: load_torch_part(path, 0, 100),
    "tokenizer": lambda path: TokenizerBase._read(object.__new__(TokenizerBase), "vocab", path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [a_pipe, an_endless_link])
def test_neither_a_pipe_nor_a_device_is_waited_for(make: Callable[[Path], None], reader: str, tmp_path: Path) -> None:
    make(tmp_path / "f")
    with pytest.raises((CheckpointError, TokenizerError), match="it is no regular file"):
        READERS[reader](tmp_path / "f")


@pytest.mark.parametrize("make", [a_pipe, an_endless_link, a_hole])
def test_a_file_that_names_the_newest_tag_is_small(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "latest")
    assert _latest_tag(tmp_path) is None


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    a_hole(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="cannot be read: it holds 1,099,511,627,776 bytes, and at most"):
        read_json(tmp_path / "config.json")
    (tmp_path / "f").write_bytes(b"12345")
    assert read_regular(tmp_path / "f", 5) == b"12345"
    with pytest.raises(OSError, match="it holds 5 bytes, and at most 4 are read"):
        read_regular(tmp_path / "f", 4)
