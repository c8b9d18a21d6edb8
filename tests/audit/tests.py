"""Which old test became which new one, and whether it asserts less.

A test is a function: its cases are counted where the decorator lists them. A test that is no longer at its place is
looked for among the new ones, by its name and then by the similarity of its body. What a file holds beside tests
(fixtures, helpers, constants) is compared as if it were one more test, called ``(helpers)``.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from tests.audit.commits import files_at

ALIKE = 0.55
"""Least similarity of two bodies, from 0 to 1, that makes one the other's successor."""

TOLERANCES = ("rtol", "atol", "abs", "rel")
HELPERS = "(helpers)"


@dataclass(frozen=True)
class Test:
    """A test function, or what a file holds beside them.

    Attributes:
        code: its statements, without docstrings.
        cases: how many the decorators list; ``None`` where they are computed.
    """

    __test__ = False  # the name is not for pytest

    file: str
    name: str
    code: str
    cases: int | None

    @property
    def id(self) -> str:
        """As pytest writes it."""
        return f"{self.file}::{self.name}"

    @cached_property
    def tree(self) -> ast.Module:
        """The statements."""
        return ast.parse(self.code)

    @property
    def asserts(self) -> int:
        """Facts that are checked: operands of ``and`` count one by one, expected errors and comparing calls as well."""
        return sum(map(_facts, ast.walk(self.tree)))

    @property
    def tolerances(self) -> Counter[str]:
        """``rtol=1e-6`` and the like, as written, and constants that are called so."""
        found = [f"{k.arg}={ast.unparse(k.value)}" for k in _keywords(self.tree) if k.arg in TOLERANCES]
        constants = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        return Counter(found + [text for node in constants if "TOLERANCE" in (text := ast.unparse(node))])


def _facts(node: ast.AST) -> int:
    if isinstance(node, ast.Assert):
        return len(node.test.values) if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else 1
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in ("raises", "warns", "assert_close", "assert_allclose")
    return 0


def _keywords(tree: ast.AST) -> Iterator[ast.keyword]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from node.keywords


def collected(files: Mapping[str, str]) -> dict[str, Test]:
    """Id -> test, and the helpers of each file."""
    found = {}
    for path, text in files.items():
        tree = _without_docstrings(ast.parse(text))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        others = [n for n in tree.body if n not in functions and not isinstance(n, ast.Import | ast.ImportFrom)]
        for function in functions:
            test = Test(path, function.name, ast.unparse(function), _cases(function))
            found[test.id] = test
        helpers = Test(path, HELPERS, "\n".join(map(ast.unparse, others)), 1)
        found[helpers.id] = helpers
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _cases(function: ast.FunctionDef) -> int | None:
    count = 1
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            values = decorator.args[1]
            if not isinstance(values, ast.List | ast.Tuple) or any(isinstance(v, ast.Starred) for v in values.elts):
                return None
            count *= len(values.elts)
    return count


def successors(old: Mapping[str, Test], new: Mapping[str, Test]) -> dict[str, Test | None]:
    """Old id -> what it became; ``None``: it is gone."""
    found: dict[str, Test | None] = {id: new[id] for id in old if id in new}
    free = {id: test for id, test in new.items() if id not in old}
    likely = []
    for test in (test for id, test in old.items() if id not in new):
        for other in free.values():
            if (test.name == HELPERS) == (other.name == HELPERS):
                same_name = test.name == other.name != HELPERS
                alike = SequenceMatcher(None, test.code, other.code, autojunk=False).ratio()
                if same_name or alike >= ALIKE:
                    likely.append((same_name, alike, test.id, other.id))
    for *_, id, other_id in sorted(likely, reverse=True):
        if id not in found and other_id in free:
            found[id] = free.pop(other_id)
    return found | {id: None for id in old if id not in found}


def table(old: str, new: str) -> list[str]:
    """A line for each test that is not as it was, what may be a loosening, and counts."""
    before, after = (collected(files_at(commit, ("tests",), (".py",))) for commit in (old, new))
    became = successors(before, after)
    lines, less = [], []
    counts = Counter({"kept": 0, "changed": 0, "moved": 0, "moved and changed": 0, "gone": 0})
    for id, test in before.items():
        now = became[id]
        if now is None:
            what, then = "gone", "-"
        else:
            moved, changed = now.id != id, now.code != test.code
            what = " and ".join(["moved"] * moved + ["changed"] * changed) or "kept"
            then = now.id if moved else "(same place)"
            less += [f"{now.id}: {loss}" for loss in losses(test, now)]
        counts[what] += test.name != HELPERS
        if what != "kept":
            facts = "" if now is None else f"  facts {test.asserts} -> {now.asserts}"
            lines.append(f"{what:18} {id} -> {then}{facts}")
    kept = {test.id for test in became.values() if test is not None}
    fresh = [id for id, test in after.items() if id not in kept and test.name != HELPERS]
    lines += [f"{'new':18} {id}" for id in fresh]
    summary = [f"{sum(counts.values())} tests: " + ", ".join(f"{count} {what}" for what, count in counts.items())]
    return [*lines, "", "May assert less:", *(less or ["nothing"]), "", *summary, f"{len(fresh)} new tests"]


def losses(old: Test, new: Test) -> Iterator[str]:
    """In what a test may assert less than before: for a reader to judge."""
    if new.asserts < old.asserts:
        yield f"facts {old.asserts} -> {new.asserts}"
    if old.cases is not None and new.cases is not None and new.cases < old.cases:
        yield f"cases {old.cases} -> {new.cases}"
    if old.tolerances != new.tolerances:
        gone, come = old.tolerances - new.tolerances, new.tolerances - old.tolerances
        yield f"tolerances {sorted(gone.elements())} -> {sorted(come.elements())}"
