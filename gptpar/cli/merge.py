"""``gptpar merge``: join .bin/.idx data sets."""

from __future__ import annotations

from gptpar.cli.flags import parser_of
from gptpar.data.merge import merge


def main(argv: list[str]) -> int:
    """Join, and print a summary."""
    args = parser_of("merge").parse_args(argv)
    print(merge(args.input, args.output_prefix))
    return 0
