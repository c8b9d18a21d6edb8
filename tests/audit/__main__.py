"""Command line: see the package."""

from __future__ import annotations

import argparse

import tests.audit
from tests.audit import lines
from tests.audit import tests as old_and_new


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.audit",
        description=tests.audit.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["tests", "lines"])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a commit")
    args = parser.parse_args()
    print("\n".join((lines if args.what == "lines" else old_and_new).table(args.old, args.new)))


if __name__ == "__main__":
    main()
