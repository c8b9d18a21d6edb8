"""A run of several processes owns its folder as one."""

import os
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, save_checkpoint
from gptpar.errors import CheckpointError
from gptpar.run.run_folder import folder
from gptpar.run.run_folder.folder import open_run_folder
from gptpar.run.run_folder.owner import current_claim
from tests.spawn import spawn


def _use(rank: int, root: Path) -> None:
    said: list[str] = []
    with open_run_folder(root, None, said.append) as taken:
        claim = current_claim(root)
        assert claim is not None and claim.process is not None
        assert (claim.process.pid == os.getpid()) == (rank == 0)
        with pytest.raises(CheckpointError, match="is in use"), open_run_folder(root, None, said.append):
            pass
        taken.go_on_from(2, 4, anew=False, chosen=True)
        assert [number for number, _ in find_checkpoints(root)] == [2]
        assert len(said) == (rank == 0)
        torch.distributed.barrier()
        if rank == 0:
            (root / "iter_0000009").mkdir()  # another run came, saved and left
            (root / "owner-1.json").unlink()
        with pytest.raises(CheckpointError, match="was taken by another run"):
            save_checkpoint(root, 3, {"w": torch.zeros(2)}, {}, permit=taken.require_owner)
    assert [number for number, _ in find_checkpoints(root)] == [9, 2]


def _on_disks_of_their_own(rank: int, root: Path) -> list[str]:
    folder.SEEN_SECONDS = 0.3
    mine = root / f"machine{rank}" / "run"  # the same path on each machine would be two disks
    with pytest.raises(CheckpointError) as error, open_run_folder(mine, None, print):
        pass
    return [str(error.value), *(path.name for path in mine.parent.glob("run/*"))]


def _both(rank: int, root: Path) -> list[str]:
    _use(rank, root / "run")
    return _on_disks_of_their_own(rank, root)


def test_refusals_and_losses_of_a_folder_are_told_to_every_process(tmp_path: Path) -> None:
    """Also that the machines do not share it, before the first step."""
    for number in (2, 4):
        save_checkpoint(tmp_path / "run", number, {"w": torch.zeros(2)}, {})
    everyone = spawn(_both, 2, tmp_path)
    assert everyone[0] == everyone[1] and len(everyone[0]) == 1
    assert f"{tmp_path}/machine1/run on" in everyone[0][0] and "that all machines share" in everyone[0][0]
