"""The comparison of two commits' tests and sizes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.audit.commits import files_at
from tests.audit.lines import by_room, logical_lines
from tests.audit.tests import collected, losses, successors

OLD = '''
"""Docstring."""
import pytest
SIZES = [1, 2]

def helper(x):
    assert x == pytest.approx(1, rel=1e-9)

@pytest.mark.parametrize("n", [1, 2, 3])
def test_stays(n):
    """Docstring."""
    assert n and n > 0
    helper(n)

def test_moves():
    values = [n * n for n in range(100) if n % 7]
    torch.testing.assert_close(values, values, rtol=1e-6, atol=0)

@pytest.mark.parametrize("n", SIZES)
def test_goes(n):
    with pytest.raises(ValueError):
        raise ValueError
'''
NEW_SAME_FILE = (
    OLD[: OLD.index("def test_moves")].replace("1, 2, 3", "1, 2").replace("n and n > 0", "n").replace("1e-9", "1e-8")
)
NEW_OTHER_FILE = OLD[OLD.index("def test_moves") : OLD.index("@pytest.mark.parametrize", OLD.index("def test_moves"))]
NEW_OTHER_FILE = NEW_OTHER_FILE.replace("test_moves", "test_has_moved")


def test_what_became_of_each_test_and_what_it_asserts_less() -> None:
    old = collected({"a.py": OLD})
    new = collected({"a.py": NEW_SAME_FILE, "b.py": NEW_OTHER_FILE})
    assert [(test.cases, test.asserts) for test in old.values()] == [(3, 2), (1, 1), (None, 1), (1, 1)]
    became = {id: test and test.id for id, test in successors(old, new).items()}
    assert became == {
        "a.py::test_stays": "a.py::test_stays",
        "a.py::(helpers)": "a.py::(helpers)",
        "a.py::test_moves": "b.py::test_has_moved",
        "a.py::test_goes": None,
    }
    assert list(losses(old["a.py::test_stays"], new["a.py::test_stays"])) == ["facts 2 -> 1", "cases 3 -> 2"]
    assert list(losses(old["a.py::(helpers)"], new["a.py::(helpers)"])) == ["tolerances ['rel=1e-09'] -> ['rel=1e-08']"]
    assert list(losses(old["a.py::test_moves"], new["b.py::test_has_moved"])) == []


def test_logical_lines_are_those_that_do_something() -> None:
    python = (
        '"""Text."""\n\nclass A:\n    """Text."""\n\n    x = (1,\n         2)  # why\n    """Text."""\n\ndef f(): ...\n'
    )
    assert logical_lines("a.py", python) == 3
    assert logical_lines("a.h", '// a\n\n/* b\nc */ int d;\nauto e = "// no comment";  // f\n}\n') == 3
    files = {"gptpar/a.py": python, "gptpar/b/c.py": python, "gptpar/b/d.py": "x = 1\n", "csrc/a.h": "int d;\n"}
    rooms = by_room(files)
    assert rooms == {"gptpar/a": 3, "gptpar/b": 4, "csrc": 1}


def test_files_are_those_of_a_commit(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "code" / "a.txt").write_text("no code\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "code" / "a.py").write_text("x = 2\n")
    assert files_at("HEAD", ("code",), (".py",), tmp_path) == {"code/a.py": "x = 1\n"}
