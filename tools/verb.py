"""Runs a verb of this checkout's gptpar, for the scripts here that have the names of Megatron-LM's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.cli import main


def run(verb: str) -> None:
    """End the script as ``gptpar VERB`` ends, with the script's words."""
    sys.exit(main([verb, *sys.argv[1:]]))
