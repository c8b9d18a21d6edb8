"""The error of a full disk names the file that was being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.system.files import atomic_output


def full_disk(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_full_disk_under_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as error, atomic_output(tmp_path / "corpus.jsonl"):
        raise full_disk()
    assert error.value.filename == str(tmp_path / "corpus.jsonl")
    with pytest.raises(OSError, match="Input/output") as other, atomic_output(tmp_path / "corpus.jsonl"):
        raise full_disk(errno.EIO)  # perhaps of another file, which is read meanwhile
    assert other.value.filename is None


def test_a_full_disk_under_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(tmp_path / "corpus")
    with pytest.raises(OSError, match="No space") as error, IndexedDatasetWriter(prefix, np.uint16):
        raise full_disk()
    assert error.value.filename == f"{prefix}.bin"

    def fail(file: object) -> None:
        raise full_disk()

    monkeypatch.setattr("gptpar.data.indexed.sync_file", fail)
    with pytest.raises(OSError, match="No space") as late, IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2])
    assert late.value.filename == f"{prefix}.bin" and not list(tmp_path.iterdir())
