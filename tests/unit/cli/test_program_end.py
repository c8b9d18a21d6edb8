"""A launched program ends as Python ends it, though the interpreter is not taken apart."""

import os
import subprocess
from pathlib import Path

import pytest

from gptpar.cli.launch.program import Program

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """The end of a launcher's worker that runs a script of this text, in this folder."""
    script = folder / "train.py"
    script.write_text(text)
    program = Program("script", str(script), ("--rate=0.1", "rank ${local_rank}"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "3"}
    command = program.command({"LOCAL_RANK": "3"})
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_what_a_program_relies_on_happens(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import atexit, sys, threading, time\n"
        "text, raw = open('text', 'w'), open('raw', 'wb')\n"
        "text.write('not closed'); raw.write(b'bytes')\n"
        "atexit.register(lambda: print('handler', flush=False))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], flush=False)\n"
        "sys.exit()",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "__main__ True ['--rate=0.1', 'rank 3']\nthread\nhandler\n"
    assert ((tmp_path / "text").read_text(), (tmp_path / "raw").read_bytes()) == ("not closed", b"bytes")


@pytest.mark.parametrize(
    ("end", "status", "told"), [pytest.param("7", 7, "", marks=pytest.mark.slow), ("'no data'", 1, "no data\n")]
)
def test_its_status_is_the_processs(tmp_path: Path, end: str, status: int, told: str) -> None:
    done = run(tmp_path, f"import sys; sys.exit({end})")
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)
