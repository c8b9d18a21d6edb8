"""The shape of the house: imports point one way, pure rooms stay pure, files and functions stay readable."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gptpar.cli import VERBS
from tests.documents import ROOT, block

PACKAGE = ROOT / "gptpar"
IMPORTS = block("architecture.md", "Which package may import which", "imports")
"""From the bottom up: a room may import itself and the rooms of the rows above its own."""
ROWS = [*(line.split() for line in IMPORTS.splitlines()), ["__init__", "__main__"]]
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
# These import themselves and the three lowest rows, and no model room imports them.
STANDALONE = {"data", "checkpoint"}
FIRST_USER_OF_STANDALONE = ROW_OF["reporting"]

PURE = (
    "adapter/units.py adapter/guards/refusals.py config topology/mesh.py topology/placement.py optim/schedule.py "
    "engine/ranges.py engine/table.py engine/units.py pipeline/partition.py pipeline/schedules.py run/batch_plan.py "
    "plan/hardware.py plan/space optim/step_schedules.py adapter/options.py data/order.py data/splits.py "
    "tensor_parallel/cost.py"
)
HEAVY = ["tensorboard", "matplotlib", "sentencepiece", "tiktoken", "transformers", "safetensors"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 75
MAX_BRANCHES = 14
"""Of a function in gptpar: see ``branches_of``."""
BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While),
    *(ast.comprehension, ast.ExceptHandler, ast.Assert, ast.match_case),
)
LEAVES = frozenset({ast.Load, ast.Store, ast.Name, ast.Constant, ast.arg})
"""Nodes that hold nothing that is counted; most of all nodes."""


class Function(NamedTuple):
    """A function of a file; ``branches`` is McCabe's number."""

    line: int
    name: str
    lines: int
    branches: int


class Facts(NamedTuple):
    """What the tests ask of a file; its syntax tree would be a million objects for each garbage collection."""

    lines: int
    functions: list[Function]
    classes: list[str]
    imports: list[tuple[int, str]]
    """(line, absolute module name) of every import, those inside functions too."""
    docstring: str


@functools.cache
def facts_of(file: Path) -> Facts:
    """A file is parsed once for all tests."""
    text = file.read_text()
    tree = ast.parse(text, str(file))
    found = Facts(len(text.splitlines()), [], [], [], ast.get_docstring(tree) or "")

    def visit(node: ast.AST) -> int:
        """Note what is in a node; returns how many branches of functions around it are there."""
        branches = branches_of(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = sum(map(visit, node.body))
            found.functions.append(Function(node.lineno, node.name, node.end_lineno - node.lineno + 1, 1 + inside))
            return inside
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.Import):
            found.imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = file.relative_to(ROOT).with_suffix("").parts
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found.imports.extend((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        for value in vars(node).values():  # a quarter of the time of ast.iter_child_nodes
            for child in value if type(value) is list else (value,):
                if isinstance(child, ast.AST) and type(child) not in LEAVES:
                    branches += visit(child)
        return branches

    visit(tree)
    return found


def branches_of(node: ast.AST) -> int:
    """Places of a node where a function may go on in another way; McCabe's number is one more than all of them.

    These are the branching statements and expressions, a comprehension and each of its conditions, each ``and`` and
    ``or``, each ``case``. What functions inside have counts, too: a reader meets it in the same place.
    """
    count = int(type(node) in BRANCHES)
    count += len(node.ifs) if type(node) is ast.comprehension else 0
    return count + (len(node.values) - 1 if type(node) is ast.BoolOp else 0)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in STANDALONE:
        return imported in ROWS[0] + ROWS[1] + ROWS[2]
    if imported in STANDALONE:
        return ROW_OF[importer] >= FIRST_USER_OF_STANDALONE
    return ROW_OF[imported] < ROW_OF[importer]


def test_every_room_has_its_place():
    rooms = {room_of(p) for p in PACKAGE.rglob("*.py")}
    unknown = rooms - set(ROW_OF) - STANDALONE
    assert not unknown, f"add {sorted(unknown)} to the imports in docs/architecture.md, below what it imports"


def imports(folder: Path = PACKAGE) -> Iterator[tuple[Path, str, str]]:
    """(file, its line in words, absolute module name) of every import of a folder, or of a file."""
    for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        for line, module in facts_of(file).imports:
            yield file, f"{file.relative_to(ROOT)}:{line} imports {module}", module


def test_imports_point_one_way():
    wrong = []
    for file, told, module in imports():
        package, _, inner = module.partition(".")
        imported = inner.split(".")[0]
        known = {imported, room_of(file)} <= set(ROW_OF) | STANDALONE
        if package == "gptpar" and known and not may_import(room_of(file), imported):
            wrong.append(told)
    assert not wrong, "\n".join(wrong)


def test_other_programs_formats_have_one_door():
    inner = [(file, told) for file, told, name in imports() if re.match(r"gptpar\.exchange\.\w+\.", name)]
    wrong = [told for file, told in inner if room_of(file) != "exchange"]
    assert not wrong, "\n".join(wrong)


def test_pure_rooms_do_not_import_torch_distributed():
    of_pure = [one for room in PURE.split() for one in imports(PACKAGE / room)]
    wrong = [told for _, told, module in of_pure if f"{module}.".startswith("torch.distributed.")]
    assert of_pure and not wrong, "\n".join(wrong)


def test_no_two_public_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in facts_of(file).classes:
            if not name.startswith("_"):
                homes.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_each_file_says_what_it_does():
    silent = [str(file.relative_to(ROOT)) for file in sorted(PACKAGE.rglob("*.py")) if not facts_of(file).docstring]
    assert not silent, f"begin these with a docstring: {silent}"


def test_each_verb_has_a_module_of_its_name():
    for verb in VERBS:
        name = verb.replace("-", "_")
        found = [p for p in (PACKAGE / f"cli/{name}.py", PACKAGE / f"cli/{name}/__init__.py") if p.exists()]
        assert len(found) == 1 and "def main(argv" in found[0].read_text(), verb


def test_importing_gptpar_is_light():
    program = "import sys, gptpar; print(*[m for m in sys.argv[1:] if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program, *HEAVY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_module_imports_torchs_compiler_when_it_is_imported():
    """``torch.compiler.disable`` does, for 1.5 s of each process; ``not_compiled`` of core_attention.py does not."""
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    assert not [str(file.relative_to(ROOT)) for file, text in texts.items() if "@torch.compiler.disable" in text]


@pytest.mark.parametrize("folder", ["gptpar", "tools", "benchmarks", pytest.param("tests", marks=pytest.mark.slow)])
def test_files_and_functions_are_short_and_gptpars_have_few_branches(folder):
    wrong = []
    for file in [ROOT / "setup.py", *sorted((ROOT / folder).rglob("*.py"))]:
        facts, place = facts_of(file), file.relative_to(ROOT)
        if facts.lines > MAX_FILE_LINES:
            wrong.append(f"{place} has {facts.lines} lines, more than {MAX_FILE_LINES}")
        for one in facts.functions:
            if one.lines > MAX_FUNCTION_LINES:
                wrong.append(f"{place}:{one.line} {one.name} has {one.lines} lines, more than {MAX_FUNCTION_LINES}")
            if one.branches > MAX_BRANCHES and folder == "gptpar":
                wrong.append(f"{place}:{one.line} {one.name} has {one.branches} branches, more than {MAX_BRANCHES}")
    assert not wrong, "\n".join(wrong)
