"""Whole runs: evaluations, options that Megatron's users know, requests to stop, a run's own file, fitted lengths."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gptpar.cli
from gptpar.checkpoint import find_checkpoints, load_meta
from gptpar.errors import ConfigError
from gptpar.reporting.metrics_file import read_metrics
from gptpar.run.fitted_length import FittedLength
from gptpar.run.trainer import Trainer
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines
from tests.unit.run.whole_runs import FEW, assert_same_tensors, iterations, losses, run


@pytest.mark.slow
def test_a_kill_switch_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, update = tmp_path / "stop", Trainer.update

    def updated(self: Trainer, *args: object, iteration: int, **others: object) -> object:
        if iteration == 2:
            switch.touch()
        return update(self, *args, iteration=iteration, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", updated)
    flags = f"--save-interval 100 --kill-switch-path {switch}"
    run(tmp_path / "run", flags)
    assert iterations(tmp_path / "run") == [3]  # it appears in step 2 after the processes' vote
    with pytest.raises(ConfigError, match=r"--kill-switch-path .*stop is there already, so the run would stop at once"):
        run(tmp_path / "run", flags)


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_bits_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every step of it takes deterministic kernels alone, and adds the parts of bf16 sums in fp32 if asked to."""
    update, found, products = Trainer.update, [], torch.backends.cuda.matmul
    adds_in_bf16 = products.allow_bf16_reduced_precision_reduction

    def updated(self: Trainer, *args: object, **others: object) -> object:
        adds = products.allow_bf16_reduced_precision_reduction
        found.append((torch.are_deterministic_algorithms_enabled(), adds))
        return update(self, *args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", updated)
    flags = (
        "--bf16 --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1 --num-query-groups 2 "
        "--window-size 4 --cpu-optimizer --cpu-optimizer-ratio 0.5 --disable-bf16-reduced-precision-matmul "
        "--train-iters 3"
    )
    for name in ("one", "other"):
        run(tmp_path / name, flags)
    assert_same_tensors(tmp_path / "one/iter_0000003", tmp_path / "other/iter_0000003")
    assert found == [(True, False)] * 6 and not torch.are_deterministic_algorithms_enabled()
    assert products.allow_bf16_reduced_precision_reduction == adds_in_bf16


FLAGS = f"{FEW} --lr-decay-style constant --save-interval 2 --no-async-save --data-cache-path cache"


@pytest.mark.slow
def test_a_run_is_repeated_and_goes_on_from_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, or further in the same one, whose file then says the longer run."""

    def pretrain(flags: str) -> None:
        assert gptpar.cli.main(["pretrain", *flags.split()]) == 0

    monkeypatch.chdir(tmp_path)
    a, b, c = map(Path, "abc")
    pretrain(f"{FLAGS} --train-iters 3 --save a")
    pretrain("--config a/config.toml --save b")
    of_a, of_b = ((one / "config.toml").read_text().split("\n\n", 1)[1] for one in (a, b))
    assert of_b == of_a.replace('save = "a"', 'save = "b"')
    assert len(losses(a)) == 3 and losses(b) == losses(a)
    pretrain("--config a/config.toml --load a --train-iters 5")
    pretrain("--config a/config.toml --load c --save c")
    assert len(losses(c)) == 5 and losses(c) == losses(a)


EVALUATES = "--train-iters 4 --eval-iters 5 --eval-interval 2 --log-interval 100"


def on_batch(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> None:
    """Do something as an evaluation batch is computed, counted over the run."""
    evaluate, seen = Trainer.evaluate, []

    def then(self: Trainer, batches: object) -> torch.Tensor:
        seen.append(True)
        if len(seen) == number:
            action()
        return evaluate(self, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "evaluate", then)


def fail() -> None:
    raise RuntimeError("the evaluation failed")


def test_a_save_comes_before_the_evaluation_of_the_same_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_batch(monkeypatch, 1, fail)
    with pytest.raises(RuntimeError, match="the evaluation failed"):
        run(tmp_path, f"{EVALUATES} --save-interval 2")
    assert load_meta(tmp_path)["progress"]["iteration"] == 2


def test_an_evaluation_ends_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_batch(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(tmp_path, EVALUATES) == signal.SIGTERM
    lines = capsys.readouterr().out.splitlines()
    assert " > left the evaluation on valid data after 2 of 5 batches" in lines
    assert lines[-1] == f" > stopped by SIGTERM; --load {tmp_path} goes on from here"
    assert load_meta(tmp_path)["progress"]["iteration"] == 2
    assert [*losses(tmp_path)] == [1, 2] and "validation" not in (tmp_path / "metrics.jsonl").read_text()


FITS = 24


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which 24 steps fit."""
    monkeypatch.setattr(FittedLength, "measured", lambda length: (1.0, FITS + 1.5 - len(length._times)))


def train(folder: Path, more: str = "") -> list[dict[str, float]]:
    """What metrics.jsonl holds after a run."""
    length = "--train-iters 500 --train-minutes 0.4 --lr-warmup-iters 12 --lr-decay-style cosine"
    run(folder, f"{length} --log-interval 100 --load {folder} {more}")
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_a_resumed_run_has_the_length_of_the_uninterrupted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
@pytest.mark.usefixtures("machine")
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


@pytest.fixture
def files(tmp_path: Path) -> str:
    names = ("questions.jsonl", QUESTIONS), ("texts.jsonl", TEXTS)
    return " ".join(write_lines(tmp_path / name, lines) for name, lines in names)


@pytest.mark.slow
def test_what_a_run_evaluates_changes_no_bit_of_it(tmp_path: Path, files: str) -> None:
    dropout = "--hidden-dropout 0.1"  # its masks are functions of the iteration, not of what is drawn in between
    plain, evaluated = tmp_path / "a", tmp_path / "b"
    run(plain, dropout, BYTES)
    run(evaluated, f"{dropout} --eval-tasks {files} --eval-tasks-interval 1", BYTES)
    assert_same_tensors(plain / "iter_0000004", evaluated / "iter_0000004")
    assert losses(plain) == losses(evaluated) and len(losses(plain)) == 4


def test_scores_are_written_at_their_interval_and_at_the_end(
    tmp_path: Path, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, f"--eval-tasks {files} --eval-tasks-interval 3 --eval-limit 3", BYTES)
    found = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "task" in line]
    assert [(line["iteration"], line["task"], line["num_items"]) for line in found] == [
        *((3, "questions", 3), (3, "texts", 2)),
        *((4, "questions", 3), (4, "texts", 2)),
    ]
    assert found[0].keys() >= {"acc", "acc_norm", "acc_bytes", "acc_stderr", "seconds", "num_tokens"}
    assert 5 < found[1]["bits_per_byte"] < 12 and found[0]["seconds"] > 0
    said = capsys.readouterr().out
    assert " questions at iteration 3 | acc: " in said and " texts at iteration 4 | bits_per_byte: " in said
    assert "3 items in " in said and " tokens/s)" in said
