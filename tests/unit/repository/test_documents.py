"""What documents say of this checkout is so: commands, paths, links, tables."""

import argparse
import ast
import functools
import pydoc
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gptpar
import gptpar.cli
from gptpar.cli.pretrain import start_checks
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.documents import PAGES, ROOT, blocks, commands

OTHER_PROGRAMS = {"cd", "git", "mkdocs", "sbatch", "tensorboard", "torchrun"}
page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Parsed(Exception):
    """The parser took the words; nothing else is to be done."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb ends when its parser has read the command line, with the words that it did not know."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        _, unknown = original(self, args, namespace)
        raise Parsed([*unknown, *getattr(self, "problems", [])])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def gptpar_problems(words: Sequence[str]) -> list[str]:
    try:
        gptpar.cli.main(words)
    except Parsed as parsed:
        return list(parsed.args[0])
    except SystemExit as end:
        return [] if end.code == 0 else ["its parser exits"]
    return [] if list(words) in (["--help"], []) else ["it ends before its words are read"]


def flags_missing_in(sources: Sequence[Path], words: Sequence[str]) -> list[str]:
    """Flags that none of a program's files names."""
    text = "".join(path.read_text() for path in sources)
    return [word for word in words if word.startswith("--") and f'"{word}"' not in text]


def python_problems(words: Sequence[str], saved: set[str]) -> list[str]:
    match list(words):
        case ["-m", "gptpar", *rest]:
            return gptpar_problems(rest)
        case ["-m", module, *rest] if module.startswith("tests."):
            folder = ROOT / module.replace(".", "/")
            sources = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
            return flags_missing_in(sources, [word for word in rest if word != "--"])
        case ["-m", "mkdocs", *_]:
            return []
        case ["tools/estimate_memory.py", *_]:  # its flags are those of plan
            return []
        case [script, *rest] if (ROOT / script).exists():
            folder = (ROOT / script).parent  # an example with a folder of its own shares flags between its files
            together = folder.parent == ROOT / "examples"
            sources = sorted(folder.glob("*.py")) if together else [ROOT / script]
            return flags_missing_in(sources, rest)
        case [script, *_] if script in saved:
            return []
    return [f"there is no {' '.join(words[:2])}"]


def problems_of(words: Sequence[str], saved: set[str]) -> list[str]:
    match list(words):
        case ["gptpar", *rest]:
            return gptpar_problems(rest)
        case ["python", *rest]:
            return python_problems(rest, saved)
        case ["bash" | "source", script, *_]:
            return [] if (ROOT / script).exists() else [f"there is no {script}"]
        case ["pip", "install", what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            wanted = re.findall(r"\w+", what)
            return [f"there is no extra {extra}" for extra in wanted if extra not in extras]
        case [program, *_] if program in OTHER_PROGRAMS:
            return []
    return ["nobody knows this program"]


@functools.cache
def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """(heading, words) of every command in every bash block."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = [one for one in blocks(page) if one.language == "bash"]
        return [(one.heading, words) for one in scripts for words in commands(one.text, Path(folder))]


@page_by_page
def test_every_command_is_understood(page: Path, only_parse: None) -> None:
    """Bash reads it, and its parser takes the words."""
    saved = set(re.findall(r"[Ss]ave as\s+`(\w+\.py)`", page.read_text()))
    wrong = []
    for heading, words in commands_of(page):
        wrong += [f"{heading}: {' '.join(words)}: {problem}" for problem in problems_of(words, saved)]
    assert not wrong, "\n".join(wrong)


def test_mistakes_in_commands_are_found(tmp_path: Path, only_parse: None) -> None:
    script = "gptpar pretrain --num-layer 2\ngptpar pretrain --lr fast\ngptpar plan --searching\npython tools/no.py\nno"
    assert all(problems_of(words, set()) for words in commands(script, tmp_path))
    with pytest.raises(AssertionError):
        commands("gptpar 'pretrain", tmp_path)


@page_by_page
def test_complete_pretraining_commands_have_no_problems(page: Path) -> None:
    """Those that need no file: on synthetic data."""
    for _, words in commands_of(page):
        if "pretrain" in words and "--mock-data" in words and "--deepspeed" not in words:
            parsed = parse_flags(words[words.index("pretrain") + 1 :])
            resolve(parsed, parsed.flags.parallel.nproc_per_node or 1, more=start_checks)


@page_by_page
def test_python_blocks_can_be_read_and_links_lead_somewhere(page: Path) -> None:
    for one in blocks(page):
        if one.language == "python":
            ast.parse(one.text)
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}"


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What links may name behind ``#``: headings as sites spell them."""
    headings = (heading.strip("# ").lower() for heading in re.findall(r"^#+ .*$", without_code(page), re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    text = re.sub(r"^--- .*$", "", page.read_text(), flags=re.MULTILINE)  # examples may create files
    named = set(re.findall(r"\b(?:gptpar|csrc|tests|tools|examples|benchmarks)/[\w./-]*\w", text))
    missing = [path for path in sorted(named) if not (ROOT / path).exists() and "PACKAGE" not in path]
    assert not missing, f"{page.name} names {missing}"


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"^ +- (\w[\w-]*\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_api_page_has_every_public_name() -> None:
    """Each exists and has a docstring; DeepSpeed's estimates are named in one sentence."""
    documented = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    public = {f"gptpar.{name}" for name in gptpar.__all__ if not name.startswith(("__", "estimate_zero"))}
    assert public <= set(documented)
    assert all(getattr(pydoc.locate(name), "__doc__", None) for name in documented)


def test_site_builds(tmp_path: Path) -> None:
    """Without a warning, where mkdocs and its theme are installed; its pages load nothing from other servers."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+href=\"?(?:https?:)?//", page)
        assert not re.search(r"<pre class=\"?mermaid", page)  # the theme loads what draws it from another server


def test_pages_that_everybody_reads_are_short() -> None:
    for page in ("README.md", "docs/architecture.md"):
        assert len((ROOT / page).read_text().splitlines()) <= 250, page


def test_measured_tables_are_current_and_replace_what_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    """README.md, docs/*.md and the picture are what ``python tools/measured_tables.py`` writes."""
    tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/measured_tables.py")))
    status = tool.main(["--check"])
    assert status == 0, f"run python tools/measured_tables.py: {capsys.readouterr().out}"
    stale = "before\n<!-- measured: summary -->\n| 1 |\n<!-- /measured -->\nafter"
    fresh = tool.filled(stale)
    assert fresh == f"before\n<!-- measured: summary -->\n\n{tool.summary()}\n\n<!-- /measured -->\nafter"
    assert tool.filled(fresh) == fresh
    with pytest.raises(LookupError, match="no line with"):
        tool.Figures("h100", visit="never")
