"""Runs a verb of this checkout's gptpar, for the scripts in this folder, which have Megatron-LM's names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.cli import main


def run(verb: str) -> None:
    """Run ``gptpar VERB`` with the script's words, and exit with its status."""
    sys.exit(main([verb, *sys.argv[1:]]))
