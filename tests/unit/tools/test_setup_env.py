"""Set-up uses what is there, and touches no environment of the user's own; each obstacle is one sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parents[3]


class Checkout:
    """A small copy of the project, whose dependencies are nowhere."""

    def __init__(self, folder: Path):
        self.root = folder / "check out"  # a path with a space
        (self.root / "tools").mkdir(parents=True)
        for name in ("setup_env.sh", "setup_env.py"):
            shutil.copy(ROOT / "tools" / name, self.root / "tools")
        self.require("torchling>=2.11", "small")
        (self.root / "constraints.txt").write_text("torchling==2.13.0\n")

    def require(self, *dependencies: str, test: str = "") -> None:
        (self.root / "pyproject.toml").write_text(
            f'[project]\nname = "gptpar"\ndependencies = {list(dependencies)}\n'
            f"[project.optional-dependencies]\ntest = {[test] if test else []}\n"
        )

    def setup(self, level: str = "run", cwd: str | Path = "/", **environment: str) -> subprocess.CompletedProcess[str]:
        """Source setup_env.sh, usually from another directory, as a script with arguments of its own does."""
        script = 'set -euo pipefail; source "$0" "$1"; echo "$PYTHON"; echo "$PYTHONPATH"'
        base = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.root.parent),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }
        command = ["bash", "-c", script, os.path.relpath(self.root / "tools" / "setup_env.sh", cwd), level]
        return subprocess.run(command, cwd=cwd, env=base | environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_an_interpreter_with_everything_is_used_as_it_is(checkout):
    checkout.require("numpy>=1.20", test="pytest")
    done = checkout.setup("test", cwd=checkout.root, CDPATH=f".:{checkout.root}:/tmp")
    assert done.returncode == 0, done.stderr
    python, path = done.stdout.splitlines()
    assert Path(python).samefile(sys.executable) and path == str(checkout.root)
    assert not (checkout.root / ".venv").exists()
    assert done.stderr == ""


def test_python_too_old_is_one_sentence(checkout, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "python3").write_text('#!/bin/bash\n[[ $1 == --version ]] && echo "Python 3.8.10"; exit 1\n')
    (old / "python3").chmod(0o755)
    for tool in ("bash", "dirname"):
        (old / tool).symlink_to(shutil.which(tool))
    done = checkout.setup(PATH=str(old))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "setup: gptpar needs Python 3.11 or newer and found none on PATH (python3 says: Python 3.8.10); "
        "install one, or set PYTHON=/path/to/python3.12.\n"
    )


@pytest.mark.slow
def test_a_venv_of_the_users_own_is_never_deleted(checkout):
    mine = checkout.root / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = checkout.setup()
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


def test_the_projects_own_requirements_are_all_pinned():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {line.split(">=")[0] for line in setup_env.requirements("dev", everything=True)}
    assert {"torch", "pytest", "ruff", "transformers", "setuptools"} <= names <= pinned
