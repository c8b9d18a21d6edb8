"""The words around the verbs: ``help``, ``--version``, and where the usage goes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gptpar.cli import main, usage


@pytest.mark.parametrize(("words", "status"), [("", 2), ("help", 0), ("--help", 0), ("-h", 0)])
def test_the_verbs_are_listed(words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == status
    assert capsys.readouterr().out == usage() + "\n"


def test_help_of_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "merge"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: gptpar merge ")
    assert main(["help", "marge"]) == 2
    assert "there is no verb 'marge'; did you mean merge?" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_the_usage_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "gptpar"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
