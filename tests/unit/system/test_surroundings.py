"""Processes that are born without streams, a folder or descriptors, and texts that no program writes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.system import command_line
from gptpar.system.files import MAX_TEXT_BYTES, read_regular


def ran(words: list[str], folder: Path, inside: Callable[[], object], **variables: str) -> subprocess.CompletedProcess:
    """``gptpar WORDS`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), **variables}
    command = [sys.executable, "-m", "gptpar", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, preexec_fn=inside)


def test_closed_streams_become_the_null_device() -> None:
    pid = os.fork()
    if not pid:
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None  # as Python itself has it then
        command_line.open_standard_streams()
        print("to nowhere", flush=True)
        print("to nowhere", file=sys.stderr, flush=True)
        paths = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)}
        os._exit(0 if paths == {os.devnull} and os.open(__file__, os.O_RDONLY) > 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_removed_folder_is_told(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = ran(["runs", "x"], here, here.rmdir)
    told = "error: the current folder was removed: change to another one (cd), and start again.\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_too_few_open_files_are_told(tmp_path: Path) -> None:
    done = ran(["runs", "x"], tmp_path, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 40)))
    told = "error: 40 files may be open at once, and 64 are needed: raise the limit (ulimit -n 4096).\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_the_limit_of_open_files_is_raised() -> None:
    pid = os.fork()
    if not pid:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
        command_line.prepare_process()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        os._exit(soft != min(command_line.OPEN_FILES, hard if hard >= 0 else command_line.OPEN_FILES))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_letters_that_the_locale_lacks_are_escaped(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "r\u00fcn/corpus", np.uint16) as writer:
        writer.add_document([1, 2])
    words = ["merge", "--input", "r\u00fcn/corpus", "--output-prefix", "r\u00fcn/merged"]
    done = ran(words, tmp_path, lambda: None, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert done.returncode == 0 and "r\\xfcn" in done.stdout, done.stderr


def test_a_system_without_threads_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(argv: list[str]) -> int:
        raise RuntimeError("can't start new thread")

    assert command_line.run(refused, []) == 1
    told = "the system starts no more threads: raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_a_text_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{}")
    assert read_regular(tmp_path / "text") == b"{}"
    os.truncate(tmp_path / "text", 1 << 40)
    with pytest.raises(OSError, match=f"it holds 1,099,511,627,776 bytes, and at most {MAX_TEXT_BYTES:,} are read"):
        read_regular(tmp_path / "text")
