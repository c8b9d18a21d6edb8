"""Set-up uses what is there, else makes .venv; each obstacle is one sentence. The packages are made here."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Builds without setuptools, which a bare .venv on a machine without network does not have.
BACKEND = """
from __future__ import annotations
import base64, hashlib, zipfile
from pathlib import Path

{make_wheel}
def build_editable(folder, config_settings=None, metadata_directory=None):
    return make_wheel(folder, "gptpar", "0.1.0").name
"""


def make_wheel(folder: str | Path, name: str, version: str) -> Path:
    """A wheel that holds one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = Path(folder) / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


class Checkout:
    """A small copy of the project on a machine without network; its dependencies lie in ``wheels/``."""

    def __init__(self, folder: Path):
        self.root = folder / "check out"  # a path with a space
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        (self.root / "tools").mkdir(parents=True)
        for name in ("setup_env.sh", "setup_env.py"):
            shutil.copy(ROOT / "tools" / name, self.root / "tools")
        self.require("torchling>=2.11", "small")
        (self.root / "constraints.txt").write_text("torchling==2.13.0\n")
        make_wheel(self.wheels, "small", "1.0")
        (self.root / "backend.py").write_text(BACKEND.format(make_wheel=inspect.getsource(make_wheel)))

    def require(self, *dependencies: str, test: str = "") -> None:
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            f'[project]\nname = "gptpar"\ndependencies = {list(dependencies)}\n'
            f"[project.optional-dependencies]\ntest = {[test] if test else []}\n"
        )

    @property
    def venv_python(self) -> Path:
        return self.root / ".venv" / "bin" / "python"

    def setup(self, level: str = "run", cwd: str | Path = "/", **environment: str) -> subprocess.CompletedProcess[str]:
        """Source setup_env.sh, usually from another directory, as a script with arguments of its own does."""
        script = 'set -euo pipefail; source "$0" "$1"; echo "$PYTHON"; echo "$PYTHONPATH"'
        base = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.root.parent),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
        }
        command = ["bash", "-c", script, os.path.relpath(self.root / "tools" / "setup_env.sh", cwd), level]
        return subprocess.run(command, cwd=cwd, env=base | environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def setup_env(checkout):
    """tools/setup_env.py of the small checkout, as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", checkout.root / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interpreter_with_everything_is_used_as_it_is(checkout):
    checkout.require("numpy>=1.20", test="pytest")
    done = checkout.setup("test", cwd=checkout.root, CDPATH=f".:{checkout.root}:/tmp")
    assert done.returncode == 0, done.stderr
    python, path = done.stdout.splitlines()
    assert Path(python).samefile(sys.executable) and path == str(checkout.root)
    assert not (checkout.root / ".venv").exists()
    assert done.stderr == ""


@pytest.mark.slow
def test_a_venv_is_made_once_and_remade_when_left_unfinished(checkout):
    failed = checkout.setup()
    assert failed.returncode == 1 and failed.stdout == ""
    assert "lacks torchling>=2.11, small" in failed.stderr and "Traceback" not in failed.stderr
    assert "failed because pip cannot reach a package index" in failed.stderr.splitlines()[-1]
    assert (checkout.root / ".venv" / "setup-stamp").read_text() == "unfinished"

    make_wheel(checkout.wheels, "torchling", "2.13.0")
    make_wheel(checkout.wheels, "torchling", "2.14.0")
    done = checkout.setup("--train-iters")  # not a level: the caller's own argument
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(checkout.venv_python), str(checkout.root)]
    assert "was left unfinished: making it anew" in done.stderr and "is ready" in done.stderr
    version = "from importlib.metadata import version; print(version('torchling'))"
    installed = subprocess.run([checkout.venv_python, "-c", version], capture_output=True, text=True)
    assert installed.stdout.strip() == "2.13.0"  # the pinned one

    again = checkout.setup()
    assert again.stdout == done.stdout and again.stderr == ""


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


def test_a_venv_of_the_users_own_is_never_deleted(checkout):
    mine = checkout.root / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = checkout.setup()
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


def test_the_projects_own_requirements_are_all_pinned():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {line.split(">=")[0] for line in module.requirements("dev", everything=True)}
    assert {"torch", "pytest", "ruff", "transformers", "setuptools"} <= names <= pinned
