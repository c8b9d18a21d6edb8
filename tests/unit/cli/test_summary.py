"""``gptpar summary`` beside a data set: whether it is the one that the run was trained on."""

from __future__ import annotations

from pathlib import Path

import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.summary import _is_another_corpus
from gptpar.data.identity import corpus_identity


def write_corpus(prefix: Path, text: bytes) -> str:
    prefix.with_suffix(".bin").write_bytes(text)
    prefix.with_suffix(".idx").write_bytes(b"no index")
    return str(prefix)


def test_other_bytes_under_a_known_name_are_noticed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", b"tokens")
    known = {"prefix": "where/it/was/a", "weight": 1.0, **corpus_identity(prefix)}
    save_checkpoint(tmp_path / "run", 1, {"w": torch.ones(2)}, {"corpora": {"--data-path": [known]}})
    assert not _is_another_corpus(tmp_path / "run", prefix)
    write_corpus(tmp_path / "a", b"tokfns")
    assert _is_another_corpus(tmp_path / "run", prefix)
