"""When a checkpoint is required and when a fresh start will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.errors import CheckpointError
from gptpar.training.resume import checkpoint_to_resume
from tests.helpers import tiny_config


def test_an_empty_run_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint_to_resume(tiny_config(f"--save {tmp_path} --load {tmp_path}")) is None


@pytest.mark.parametrize("flag", ["--finetune", "--skip-train", "--ckpt-step 3", "--exit-on-missing-checkpoint"])
def test_weights_that_were_asked_for_are_never_random(tmp_path: Path, flag: str) -> None:
    with pytest.raises(CheckpointError, match="there is no readable checkpoint.*in --load"):
        checkpoint_to_resume(tiny_config(f"--load {tmp_path} {flag}"))
