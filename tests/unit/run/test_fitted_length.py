"""``--train-minutes``: the number of steps fits the time, and a resumed run is the uninterrupted one."""

from pathlib import Path

import pytest

from gptpar.checkpoint import find_checkpoints, load_meta
from gptpar.reporting.metrics_file import read_metrics
from gptpar.run.fitted_length import FittedLength
from tests.unit.run.whole_runs import assert_same_tensors, run

FITS = 24


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which 24 steps fit."""
    monkeypatch.setattr(FittedLength, "measured", lambda length: (1.0, FITS + 1.5 - len(length._times)))


def train(folder: Path, more: str = "") -> list[dict[str, float]]:
    """What metrics.jsonl holds after a run."""
    length = "--train-iters 500 --train-minutes 0.4 --lr-warmup-iters 12 --lr-decay-style cosine"
    run(folder, f"{length} --log-interval 100 --load {folder} {more}")
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(tmp_path / "whole")
    assert len(whole) == FITS
    assert "at most 500 steps" in (said := capsys.readouterr().out)
    assert f"a step takes 1.00 s: {FITS} steps fit into 0.4 minutes of training" in said
    assert whole[11]["learning_rate"] < whole[12]["learning_rate"] == 1e-2  # the peak follows twelve steps of warm-up
    assert whole[-1]["learning_rate"] < 2e-4  # and the decay ends with the run, not after 500 steps

    train(tmp_path / "parts", "--exit-interval 17")
    assert load_meta(tmp_path / "parts")["progress"]["fitted_iters"] == FITS
    parts = train(tmp_path / "parts", "--train-minutes 9")  # decided already: other minutes change nothing
    for name in ("iteration", "lm_loss", "learning_rate"):
        assert [line[name] for line in parts] == [line[name] for line in whole]
    assert_same_tensors(*(find_checkpoints(tmp_path / name)[0][1] for name in ("whole", "parts")))


@pytest.mark.slow
def test_a_run_that_stops_before_the_decision_has_none_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no more time is left than the minutes, though the 500 steps that --train-iters allows would take seconds."""
    train(tmp_path, "--train-minutes 0.0001 --exit-interval 5 --log-interval 1")
    said = capsys.readouterr().out
    assert said.count("ETA 0:00:00\n") == 5 and "iteration        5/     500" in said
    progress = load_meta(tmp_path)["progress"]
    assert (progress["iteration"], progress["fitted_iters"]) == (5, None)
    assert len(train(tmp_path)) == 5 + FITS  # ten more steps are timed, and 14 fit after them


def test_the_minutes_left_are_those_that_have_not_passed() -> None:
    clock = iter([100.0, 130.0, 161.0])
    length = FittedLength(1.0, 500, now=lambda: next(clock))
    assert [length.seconds_left(), length.seconds_left()] == [30.0, 0.0]
