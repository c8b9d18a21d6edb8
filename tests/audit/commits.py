"""The files of a commit."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def files_at(commit: str, folders: tuple[str, ...], suffixes: tuple[str, ...], root: Path = ROOT) -> dict[str, str]:
    """Path -> text of a commit's files below some folders, in the order of their paths.

    Raises:
        subprocess.CalledProcessError: git knows no such commit or folder.
    """
    command = ["git", "archive", "--format=tar", commit, "--", *folders]
    archive = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = sorted((m for m in tar if m.isfile() and m.name.endswith(suffixes)), key=lambda m: m.name)
        return {member.name: tar.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]
