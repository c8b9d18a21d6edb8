"""The list of files in docs/architecture.md is what ``python tools/file_list.py`` writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("file_list", ROOT / "tools/file_list.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_list_of_files_is_current(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0, "docs/architecture.md is out of date: run python tools/file_list.py"


def test_every_file_is_listed_once(tool: ModuleType) -> None:
    listed = re.findall(r"^- `([\w./]+)`: .", tool.file_list(), re.MULTILINE)
    files = [*(ROOT / "gptpar").rglob("*.py"), *(ROOT / "csrc").iterdir(), *(ROOT / "tools").glob("*.*")]
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    expected = [str(file.relative_to(ROOT)) for file in files if file.is_file()]
    expected += [f"{folder.relative_to(ROOT)}/" for folder in folders]
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("a.py", '"""Adds numbers. Pure."""\n', "Adds numbers"),
        (
            "a.py",
            '"""Adds (:mod:`~gptpar.b`)\n``a``, by A et al. 2020.\n\nB."""\n',
            "Adds (`gptpar.b`) `a`, by A et al. 2020",
        ),
        ("a.h", "// Adds numbers in\n// one pass.\n//\n// Why not two.\n\n#pragma once\n", "Adds numbers in one pass"),
        (
            "a.sh",
            "#!/bin/sh\n# shellcheck shell=bash\n# Adds numbers. To be sourced:\n#\n#   source a.sh\n",
            "Adds numbers",
        ),
        ("a.py", "import a\n", ""),
    ],
)
def test_first_sentence(tool: ModuleType, name: str, text: str, sentence: str) -> None:
    assert tool.first_sentence(tool.description(Path(name), text)) == sentence


def test_a_file_without_a_description_is_named(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "silent.py").write_text("a = 1\n")
    with pytest.raises(ValueError, match="^silent.py says nothing for the list of files: begin it with a docstring"):
        tool.line_of(tmp_path / "silent.py")


def test_only_the_marked_place_changes(tool: ModuleType) -> None:
    page = "before\n<!-- files -->\n- old\n<!-- /files -->\nafter\n"
    fresh = tool.filled(page, "- new")
    assert fresh == "before\n<!-- files -->\n\n- new\n\n<!-- /files -->\nafter\n"
    assert tool.filled(fresh, "- new") == fresh
    with pytest.raises(ValueError, match="docs/architecture.md has no place for the list"):
        tool.filled("before\n", "- new")


def test_a_stale_page_is_told_and_written(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "architecture.md"
    copy.write_text("<!-- files -->\n- old\n<!-- /files -->\n")
    monkeypatch.setattr(tool, "PAGE", copy)
    monkeypatch.setattr(tool, "file_list", lambda: "- new")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().out == "architecture.md is out of date\n"
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    assert "\n- new\n" in copy.read_text()
