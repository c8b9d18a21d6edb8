"""Verbs that compute no tensor start without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIGHT = ("launch", "preprocess", "merge", "train_tokenizer", "make_corpus", "completion", "summary", "plot")
PROGRAM = """
import importlib, sys
for verb in sys.argv[1:]:
    importlib.import_module(f"gptpar.cli.{verb}")
    if "torch" in sys.modules:
        raise SystemExit(f"{verb} imports torch")
"""


def test_verbs_without_tensors_are_imported_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
