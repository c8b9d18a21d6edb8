"""``gptpar make-corpus``: a corpus from this Python's own standard library."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from gptpar.data.standard_library import make_corpus
from gptpar.system.command_line import Parser, positive_float


def main(argv: list[str]) -> int:
    """Write the file, and print a summary."""
    args = _parser().parse_args(argv)
    max_bytes = None if args.max_megabytes is None else int(args.max_megabytes * 1e6)
    print(make_corpus(args.output, Path(sysconfig.get_path("stdlib")), max_bytes))
    return 0


def _parser() -> argparse.ArgumentParser:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = Parser(
        prog="gptpar make-corpus",
        description=f"Write Python {version}'s standard library, sources and documentation, as JSON lines.",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help='.jsonl file of {"text", "source"} objects')
    parser.add_argument(
        "--max-megabytes",
        type=positive_float,
        metavar="N",
        help="stop at N million bytes of text (default: all, 10 to 25)",
    )
    return parser
