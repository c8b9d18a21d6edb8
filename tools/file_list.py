#!/usr/bin/env python
"""Fills the list of all source files at the end of docs/architecture.md from the files' own first sentences.

    python tools/file_list.py            # write docs/architecture.md
    python tools/file_list.py --check    # exit with 1 if it is out of date

The list stands between two comments, ``<!-- files -->`` and ``<!-- /files -->``. A line has a path and the first
sentence of the file's docstring, or of its first comment (C++ and shell). The tests have one line for each folder: the
first sentence of the folder's ``__init__.py``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
PLACE = re.compile(r"(<!-- files -->\n).*(<!-- /files -->)", re.DOTALL)
SUFFIXES = {".py", ".h", ".cpp", ".sh"}
COMMENT = {".h": "//", ".cpp": "//", ".sh": "#"}
DOCSTRING = re.compile(r'(?:#[^\n]*\n|\s)*r?"""(.*?)"""', re.DOTALL)
END_OF_SENTENCE = re.compile(r"\.\s+(?=[A-Z`])")


def description(path: Path, text: str) -> str:
    """The docstring of a Python file, or the first comment of another file; may be empty."""
    if path.suffix == ".py":
        found = DOCSTRING.match(text)
        return inspect.cleandoc(found[1]) if found else ""
    mark = COMMENT[path.suffix]
    lines = dropwhile(lambda line: line.startswith(("#!", "# shellcheck")), text.splitlines())
    return "\n".join(line.removeprefix(mark).strip() for line in takewhile(lambda line: line.startswith(mark), lines))


def first_sentence(text: str) -> str:
    """The first sentence of a description as Markdown, without its full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = END_OF_SENTENCE.split(paragraph, maxsplit=1)[0].removesuffix(".")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`")


def line_of(path: Path) -> str:
    """A file's line in the list; that of an ``__init__.py`` of the tests stands for its folder.

    Raises:
        ValueError: the file does not say what it is.
    """
    file = path.relative_to(ROOT)
    if not (sentence := first_sentence(description(path, path.read_text()))):
        raise ValueError(f"{file} says nothing for the list of files: begin it with a docstring (or a comment)")
    name = f"{file.parent}/" if file.parts[0] == "tests" else str(file)
    return f"- `{name}`: {sentence}"


def groups() -> Iterator[tuple[str, list[Path]]]:
    """(heading, files) of each package, then of ``csrc``, ``tools`` and ``tests``."""
    yield "gptpar", sorted((ROOT / "gptpar").glob("*.py"))
    for folder in sorted(path.parent for path in (ROOT / "gptpar").glob("*/__init__.py")):
        yield f"gptpar/{folder.name}", sorted(folder.rglob("*.py"))
    for name in ("csrc", "tools"):
        yield name, sorted(path for path in (ROOT / name).iterdir() if path.suffix in SUFFIXES)
    yield "tests", sorted((ROOT / "tests").rglob("__init__.py"))


def file_list() -> str:
    """The whole list as Markdown."""
    return "\n\n".join(f"### {name}\n\n" + "\n".join(map(line_of, files)) for name, files in groups())


def filled(text: str, files: str) -> str:
    """The page with the list between its two comments.

    Raises:
        ValueError: the comments are missing.
    """
    if not PLACE.search(text):
        raise ValueError("docs/architecture.md has no place for the list: write <!-- files --> and <!-- /files -->")
    return PLACE.sub(lambda place: f"{place[1]}\n{files}\n\n{place[2]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns 1 if ``--check`` finds it out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    options = parser.parse_args(argv)
    old = PAGE.read_text()
    new = filled(old, file_list())
    if new != old:
        print(f"{PAGE.relative_to(ROOT)} {'is out of date' if options.check else 'written'}")
        if not options.check:
            PAGE.write_text(new)
    return int(options.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
