"""The README and the pages of docs/, as tests read them: code blocks, and the commands in them."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Bash runs a block, but every command in it only writes down its words: nothing is on the PATH.
_RECORDER = r"""
PATH=/nonexistent
command_not_found_handle() { printf '%s\x1f' "$@" >&9; printf '\x1e' >&9; }
source() { command_not_found_handle source "$@"; }
cat() { while IFS= read -r line; do printf '%s\n' "$line"; done; }
PYTHON=python
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: the document.
        heading: the nearest heading above the block, without its marks.
        language: the word behind the fence; may be empty.
    """

    page: Path
    heading: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All blocks of a document, in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        above = _FENCE.sub("", text[: match.start()])
        headings = re.findall(r"^#+ (.*)$", above, re.MULTILINE)
        found.append(Block(page, headings[-1] if headings else "", match[1], match[2]))
    return found


def block(page: str, heading: str, language: str, number: int = 0) -> str:
    """The text of one block: the ``number``-th of a language under a heading of ``docs/PAGE`` or ``PAGE``."""
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    return [one.text for one in blocks(path) if (one.heading, one.language) == (heading, language)][number]


def commands(script: str, folder: Path) -> list[list[str]]:
    """The words of each command that a bash script would run; variables that it does not set are empty.

    Args:
        folder: where files that it writes by redirection go.

    Raises:
        AssertionError: bash cannot read it, or a command is neither found nor built in.
    """
    record = folder / "commands"
    with record.open("wb") as out:
        done = subprocess.run(
            ["/bin/bash", "-c", f"exec 9>&{out.fileno()}\n{_RECORDER}\n{script}"],
            cwd=folder,
            pass_fds=[out.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0 and not done.stderr, f"{script}\n{done.stderr}"
    return [line.split("\x1f")[:-1] for line in record.read_text().split("\x1e")[:-1]]
