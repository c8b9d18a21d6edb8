"""The worked examples of docs/extending.md are applied to a copy of the package, and their commands run there."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks
from tests.e2e.quick_python import quick_python

PAGE = ROOT / "docs/extending.md"
EXAMPLES = {
    "Another norm": (2, "3 steps, a save and a resume in another layout"),
    "A preset": (1, "596.05 M parameters"),
    "Another layer": (2, "the combination computes the same as one process"),
    "Another axis": (4, "equal losses and norms"),
    "An optimizer over matrices": (3, "compute the same as one process"),
}
"""How many files an example changes, and what its commands print.

Qwen3-0.6B is published with 596,049,920 parameters.
"""
FEWER = "--num-layers 4 --global-batch-size 4"
"""A model and a batch for ``check-layouts`` that take a third of the time."""


def edits(heading: str) -> dict[str, list[tuple[str, str]]]:
    """File -> (text, what takes its place) of every example's changes; lines ``@@`` are between two changes."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one in blocks(PAGE):
        if (one.heading, one.language) == (heading, "diff"):
            first, _, rest = one.text.partition("\n")
            assert first.startswith("--- ")
            for change in rest.split("@@\n"):
                lines = change.splitlines(keepends=True)
                assert all(line[:1] in " +-\n" for line in lines), one.text
                old = "".join(line[1:] for line in lines if line[0] != "+")
                new = "".join(line[1:] for line in lines if line[0] != "-")
                found.setdefault(first.removeprefix("--- ").strip(), []).append((old, new))
    return found


def applied(heading: str, folder: Path) -> None:
    """A copy of the package with an example's changes."""
    shutil.copytree(ROOT / "gptpar", folder / "gptpar")  # with what Python has compiled: most files stay
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for file, changes in edits(heading).items():
        text = (folder / file).read_text() if (folder / file).exists() else ""
        for old, new in changes:
            assert text.count(old) == 1, f"{file} holds {text.count(old)} times: {old}"
            text = text.replace(old, new)
        (folder / file).write_text(text)


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with quick_python() as executable:
        yield executable


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_works_and_changes_few_files(heading: str, python: Path, tmp_path: Path) -> None:
    num_files, printed = EXAMPLES[heading]
    applied(heading, tmp_path)
    assert len(edits(heading)) == num_files
    commands = "".join(one.text for one in blocks(PAGE) if (one.heading, one.language) == (heading, "sh"))
    commands = commands.replace("--nproc 2 --only", f"--nproc 2 {FEWER} --only")
    script = f'set -e\ngptpar() {{ "{python}" -m gptpar "$@"; }}\n{commands}'
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout, done.stdout
