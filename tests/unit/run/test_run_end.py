"""What a run does when it is asked to stop, or when something under it fails, before, in and after an evaluation."""

import os
import signal
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import load_meta
from gptpar.run.trainer import Trainer
from tests.unit.run.whole_runs import losses, run

EVALUATES = "--train-iters 4 --eval-iters 5 --eval-interval 2 --log-interval 100"


def on_batch(monkeypatch: pytest.MonkeyPatch, number: int, action: object) -> None:
    """Do something as an evaluation batch is computed, counted over the run."""
    evaluate, seen = Trainer.evaluate, []

    def then(self: Trainer, batches: object) -> torch.Tensor:
        seen.append(True)
        if len(seen) == number:
            action()  # type: ignore[operator]
        return evaluate(self, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "evaluate", then)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("the evaluation failed")


def test_a_save_comes_before_the_evaluation_of_the_same_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_batch(monkeypatch, 1, fail)
    with pytest.raises(RuntimeError, match="the evaluation failed"):
        run(tmp_path, f"{EVALUATES} --save-interval 2")
    assert load_meta(tmp_path)["progress"]["iteration"] == 2


@pytest.mark.parametrize("interval", ["--save-interval 2", pytest.param("", marks=pytest.mark.slow)])
def test_an_evaluation_ends_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interval: str
) -> None:
    on_batch(monkeypatch, 2, ask_to_stop)
    assert run(tmp_path, f"{EVALUATES} {interval}") == signal.SIGTERM
    lines = capsys.readouterr().out.splitlines()
    assert " > left the evaluation on valid data after 2 of 5 batches" in lines
    assert lines[-1] == f" > stopped by SIGTERM; --load {tmp_path} goes on from here"
    assert load_meta(tmp_path)["progress"]["iteration"] == 2
    assert [*losses(tmp_path)] == [1, 2] and "validation" not in (tmp_path / "metrics.jsonl").read_text()
