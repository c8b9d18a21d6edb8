"""``gptpar summary`` beside a data set: whether it is the one that the run was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.summary import _is_another_corpus, main
from gptpar.data.identity import corpus_identity


def write_corpus(prefix: Path, text: bytes) -> str:
    prefix.with_suffix(".bin").write_bytes(text)
    prefix.with_suffix(".idx").write_bytes(b"no index")
    return str(prefix)


def test_a_run_is_named_by_its_folder_or_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 3.0}\n{"iteration": 2, "lm_loss": 2.0}\n')
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        assert main([str(path)]) == 0
        said = capsys.readouterr().out
        assert said == "loss: 3.000 at the start, 2.000 on average over the last tenth of 2 steps\n"


def test_other_bytes_under_a_known_name_are_noticed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", b"tokens")
    known = {"prefix": "where/it/was/a", "weight": 1.0, **corpus_identity(prefix)}
    save_checkpoint(tmp_path / "run", 1, {"w": torch.ones(2)}, {"corpora": {"--data-path": [known]}})
    assert not _is_another_corpus(tmp_path / "run", prefix)
    write_corpus(tmp_path / "a", b"tokfns")
    assert _is_another_corpus(tmp_path / "run", prefix)
