"""A run folder remembers its text, model and length, and refuses others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.fit import main
from gptpar.cli.fit.machine import Machine, Pace
from gptpar.errors import GptparError


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptpar.cli.fit.this_machine", lambda: Machine(0, "fp32", 20 << 30, 0.0, "test"))
    monkeypatch.setattr("gptpar.cli.fit.measure_pace", lambda precision: Pace(1.0 / 303e6, 1.0))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my text.jsonl"
    path.write_text('{"text": "one"}\n')
    return path


def refusal(*words: object) -> str:
    with pytest.raises(GptparError) as error:
        main([str(word) for word in words])
    return str(error.value)


def test_the_same_command_gets_the_same_flags(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run", str(tmp_path / "run"), "--data", str(text), "--began"]
    assert main([*words, str(time.time() - 60)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[:2] == ["--vocab-size", "1024"] and first[first.index("--train-minutes") + 1] == "8.9"
    os.utime(text, (1, 1))  # touched, not changed
    assert main([*words, str(time.time() - 3)]) == 0
    assert capsys.readouterr().out.splitlines() == first


def test_a_finished_run_gets_no_flags_and_is_told_how_to_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run", str(tmp_path / "run")]
    main(run)
    for iteration, is_finished in ((20, False), (30, True)):
        progress = {"iteration": iteration, "fitted_iters": 30}
        save_checkpoint(tmp_path / "run", iteration, {"w": torch.ones(2)}, {"progress": progress})
        capsys.readouterr()
        assert main(run) == 0
        said = capsys.readouterr()
        assert (said.out == "") == is_finished
    assert "is finished: it has taken its 30 steps" in said.err
    assert "--train-iters 60 --override-opt-param-scheduler" in said.err
    main([*run, "--", "--train-iters", "60"])
    assert "--preset\n350M\n" in capsys.readouterr().out


def test_another_text_is_refused(tmp_path: Path, text: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_text("two")
    main(["--run", str(run), "--data", str(text)])
    remedy = f": choose another folder with RUN=..., or remove {run} to begin anew."
    said = refusal("--run", run, "--data", other)
    assert said == f"{run} was made from DATA={text}, and this command names DATA={other}{remedy}"
    assert "and this command names Python's standard library" in refusal("--run", run)
    assert "no such file" in refusal("--run", run, "--data", tmp_path / "gone.jsonl")
    text.write_text('{"text": "two"}\n')
    assert f"whose content has changed since ({text})" in refusal("--run", run, "--data", text)
