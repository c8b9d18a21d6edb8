"""Finds the newest checkpoint among several folders: the shared one, local ones, and folders in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gptpar.checkpoint.folders import find_checkpoints
from gptpar.checkpoint.proofs import known_problems


def checkpoints_in(roots: Iterable[str | Path]) -> list[tuple[int, Path]]:
    """(iteration, path) of every published checkpoint, newest first, of one iteration in the order of the folders."""
    found = [one for root in roots for one in find_checkpoints(root)]
    return sorted(found, key=lambda one: -one[0])


def newest_whole(roots: Iterable[str | Path]) -> tuple[int, Path] | None:
    """The newest checkpoint with a sound manifest and files of full size; ``None``: there is none.

    The bytes are not read. Loading proves them, and takes an older checkpoint if they are damaged.
    """
    return next(((number, path) for number, path in checkpoints_in(roots) if not known_problems(number, path)), None)
