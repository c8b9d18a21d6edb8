"""Small files of strangers are regular and bounded before they are read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gptpar.checkpoint.data_file import SourceFile
from gptpar.checkpoint.manifest import MANIFEST_NAME, read_manifest
from gptpar.data.identity import corpus_identity
from gptpar.data.index_cache import file_identity
from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter
from gptpar.data.tokenizer.base import Tokenizer as TokenizerBase
from gptpar.deepspeed.engines.tags import _latest_tag
from gptpar.errors import GptparError
from gptpar.exchange.files.safe_pickle import load_torch_file
from gptpar.exchange.files.safetensors_file import open_safetensors
from gptpar.exchange.hf_folder import read_json
from gptpar.reporting.metrics_file import cut_after
from gptpar.system.files import lies_in


class Vocabulary(TokenizerBase):
    file_names = {"vocab": "vocab.json"}


def an_endless_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def corpus_around(path: Path, end: str) -> str:
    """A corpus, one of whose files is what is there."""
    prefix = str(path.parent / "corpus")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2, 3])
    os.replace(path, prefix + end)
    return prefix


READERS: dict[str, Callable[[Path], object]] = {
    "JSON": read_json,
    "safetensors": open_safetensors,
    "torch.save": load_torch_file,
    "manifest": lambda path: read_manifest(Path(shutil.move(path, path.parent / MANIFEST_NAME)).parent),
    "a checkpoint's data": SourceFile,
    "corpus": lambda path: IndexedDataset(corpus_around(path, ".idx")),
    "its tokens": lambda path: IndexedDataset(corpus_around(path, ".bin")),
    "the identity of its tokens": lambda path: corpus_identity(corpus_around(path, ".bin")),
    "its index's identity": file_identity,
    "history": lambda path: cut_after(path, 1),
    "tokenizer": lambda path: Vocabulary()._read("vocab", path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, an_endless_link])
def test_neither_a_pipe_nor_a_device_is_waited_for(make: Callable[[Path], None], reader: str, tmp_path: Path) -> None:
    make(tmp_path / "f")
    with pytest.raises((GptparError, OSError, ValueError), match="is no regular file") as raised:
        READERS[reader](tmp_path / "f")
    assert isinstance(raised.value, ValueError) or str(tmp_path) in str(raised.value)  # its callers name the file


@pytest.mark.parametrize("make", [os.mkfifo, an_endless_link, a_hole])
def test_a_file_that_names_the_newest_tag_is_small(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "latest")
    assert _latest_tag(tmp_path) is None


COMMIT = "models--o--n/snapshots/" + "0a" * 20


@pytest.mark.parametrize(
    ("folder", "target", "lies"),
    [
        (COMMIT, "models--o--n/blobs/b", True),
        (COMMIT, "models--o--m/blobs/b", False),
        ("models--o--n/snapshots/main", "models--o--n/blobs/b", False),
        ("o/snapshots/" + "0a" * 20, "o/blobs/b", False),
        ("runs/r/huggingface", "runs/r/huggingface/below/b", True),
    ],
)
def test_links_out_of_a_folder_count_in_the_hugging_face_cache_alone(
    tmp_path: Path, folder: str, target: str, lies: bool
) -> None:
    for path in (tmp_path / folder / "f", tmp_path / target):
        path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_text("x")
    (tmp_path / folder / "f").symlink_to(tmp_path / target)
    assert lies_in(tmp_path / folder / "f", tmp_path / folder) == lies
