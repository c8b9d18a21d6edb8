"""Lists what a run folder holds, as JSON; it only reads, so that a run may go on writing meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gptpar.checkpoint import folders, proofs, verify_checkpoint
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.run.run_folder.branches import begins_at, find_branches, how_to_go_on, read_journal
from gptpar.run.run_folder.owner import current_claim


def survey(root: Path, *, verify: bool = False) -> dict[str, Any]:
    """Checkpoints, branches, owner and left-overs of a run folder.

    Args:
        verify: re-read every byte of every checkpoint, branches included, and remember what was found.
    """
    return {
        "folder": str(root),
        "owner": _owner(root),
        "checkpoints": _checkpoints(root, verify),
        "branches": [_branch(path, verify) for _, path in find_branches(root)],
        "saves": [{"path": str(path), "dead": dead} for path, dead in folders.find_temporaries(root)],
        "moved_aside": [str(path) for path in folders.find_damaged(root)],
    }


def _checkpoints(root: Path, verify: bool) -> list[dict[str, Any]]:
    found = [_checkpoint(number, path, verify) for number, path in folders.find_checkpoints(root)]
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _checkpoint(iteration: int, path: Path, verify: bool) -> dict[str, Any] | None:
    """One checkpoint; None if the run deleted it meanwhile."""
    if verify:
        proofs.remember(path, verify_checkpoint(path))
    proof, problems = proofs.recall(path), proofs.known_problems(iteration, path)
    try:
        stats = [file.stat() for file in folders.files_of(path)]
        path.stat()
    except FileNotFoundError:
        return None
    return {
        "iteration": iteration,
        "path": str(path),
        "state": "damaged" if problems else "whole",
        "saved": text_of_time(_time_of(path / MANIFEST_NAME, default=path)),
        "bytes": sum(stat.st_size for stat in stats),
        "problems": problems,
        "verified": None if proof is None else text_of_time(proof.seconds),
    }


def _branch(path: Path, verify: bool) -> dict[str, Any]:
    journal = read_journal(path)
    return {
        "name": path.name,
        "path": str(path),
        "from_iteration": begins_at(path),
        "complete": journal is None or journal.complete,
        "checkpoints": _checkpoints(path, verify),
        "owner": _owner(path),
        "go_on": how_to_go_on(path),
    }


def _owner(root: Path) -> dict[str, Any] | None:
    claim = current_claim(root)
    if claim is None:
        return None
    silence = max(0.0, time.time() - claim.sign_of_life)  # of two clocks, on another machine's file system
    process = claim.process
    return {
        "host": process and process.host,
        "pid": process and process.pid,
        "since": claim.since,
        "silent_seconds": round(silence),
        "alive": not claim.is_dead(silence),
        "path": str(claim.path),
    }


def text_of_time(seconds: float) -> str:
    """Local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _time_of(path: Path, default: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default.stat().st_mtime
