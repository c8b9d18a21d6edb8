"""Logical lines of each room: how much there is to read, however it is wrapped and explained."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Mapping

from tests.audit.commits import files_at

SUFFIXES = (".py", ".cpp", ".h")


def logical_lines(path: str, text: str) -> int:
    """Python: statements, headers of compound ones and decorators, without docstrings. C++: lines with code."""
    if not path.endswith(".py"):
        code = re.sub(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', r"\1", text, flags=re.DOTALL)
        return sum(bool(line.strip()) for line in code.splitlines())
    ends = sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))
    return ends - sum(map(_is_docstring, ast.walk(ast.parse(text))))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def by_room(files: Mapping[str, str]) -> Counter[str]:
    """Logical lines of each folder or module directly under ``gptpar/``, and of ``csrc/``."""
    rooms: Counter[str] = Counter()
    for path, text in files.items():
        top, *inner = path.split("/")
        rooms[f"{top}/{inner[0].removesuffix('.py')}" if top == "gptpar" else top] += logical_lines(path, text)
    return rooms


def table(old: str, new: str) -> list[str]:
    """A line a room, and the sum."""
    before, after = (by_room(files_at(commit, ("gptpar", "csrc"), SUFFIXES)) for commit in (old, new))
    rows = [(room, before[room], after[room]) for room in sorted(before | after)]
    rows.append(("all", before.total(), after.total()))
    return [f"{room:28} {was:6} {now:6} {now - was:+6}" for room, was, now in rows]
