"""``gptpar make-corpus``: a corpus from this Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from gptpar.cli.flags import parser_of
from gptpar.data.standard_library import make_corpus


def main(argv: list[str]) -> int:
    """Write the file, and print a summary."""
    args = parser_of("make-corpus", version=sysconfig.get_python_version()).parse_args(argv)
    max_bytes = None if args.max_megabytes is None else int(args.max_megabytes * 1e6)
    print(make_corpus(args.output, Path(sysconfig.get_path("stdlib")), max_bytes))
    return 0
