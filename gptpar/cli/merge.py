"""``gptpar merge``: join .bin/.idx data sets."""

from __future__ import annotations

import argparse

from gptpar.data.merge import merge
from gptpar.system.command_line import Parser


def main(argv: list[str]) -> int:
    """Join, and print a summary."""
    args = _parser().parse_args(argv)
    print(merge(args.input, args.output_prefix))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gptpar merge",
        description="Join tokenized corpora (.bin and .idx) of one tokenizer into one.",
        epilog="example:\n  gptpar merge --input shards/ --output-prefix data/all_text_document",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders, of which every .bin/.idx pair is taken in alphabetic order, or prefixes",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output without .bin")
    return parser
