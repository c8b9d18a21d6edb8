"""Flags for a machine, the minutes left for training, the number of steps, and the run folder that remembers them."""

import os
import time
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.fit import main
from gptpar.cli.fit.choose import LESSONS, Choice, Course, choose, for_command, teachable, training_minutes
from gptpar.cli.fit.machine import Machine, Pace
from gptpar.errors import GptparError
from gptpar.run.fitted_length import FittedLength

GIB = 1 << 30
TWO_CORES = Machine(0, "fp32", 20 * GIB, 0.0, "test")
MINUTES = Choice("train-minutes", "8", "")
COURSE = Course(Choice("preset", "350M", ""), MINUTES, LESSONS[0], 300)
PARAMETERS = 302_904_320
"""Of the 350M preset with 512 tokens and 64 positions."""


def chosen(machine: Machine, vocab_size: int = 1024) -> dict[str, str]:
    return {choice.flag: choice.value for choice in choose(machine, COURSE, vocab_size)}


def taught(seconds: float, preset: str | None = None) -> Course:
    """What a CPU is given on which a step of the 350M model takes ``seconds``, in eight minutes."""
    return teachable(Pace(seconds / PARAMETERS, 1.0), preset, 512, lambda parameters: MINUTES)


@pytest.mark.parametrize(("seconds", "preset"), [(1.5, "350M"), (3.1, "350M"), (3.4, "124M"), (20, "70M"), (60, "31M")])
def test_a_slow_cpu_gets_the_largest_model_that_it_can_teach(seconds: float, preset: str) -> None:
    course = taught(seconds)
    assert (course.preset.value, course.lesson.preset) == (preset, preset)
    assert course.steps >= course.lesson.steps


def test_choices_for_two_cpu_cores_and_for_gpus() -> None:
    flags = chosen(TWO_CORES)
    assert (flags["seq-length"], flags["micro-batch-size"], flags["global-batch-size"]) == ("64", "2", "2")
    assert (flags["train-iters"], flags["train-minutes"], flags["lr-warmup-iters"]) == ("2000", "8", "20")
    assert "bf16" not in flags and "lr-warmup-fraction" not in flags
    flags = chosen(Machine(4, "bf16", 80 * GIB, 4 * 0.35 * 989e12, "test"), 8192)
    assert (flags["seq-length"], flags["micro-batch-size"], flags["global-batch-size"]) == ("1024", "16", "64")
    assert (flags["train-iters"], flags["lr"], flags["min-lr"]) == ("1000", "3e-4", "3e-5")
    assert "train-minutes" not in flags
    small = chosen(Machine(1, "fp16", 16 * GIB, 0.35 * 125e12, "test"), 8192)
    assert int(small["micro-batch-size"]) < 16 and small["global-batch-size"] == "16" and "fp16" in small


def test_training_gets_what_twelve_minutes_leave() -> None:
    quick, slow = (training_minutes(used, 12_000_000, PARAMETERS, 1.0) for used in (5, 100))
    assert (quick.value, slow.value) == ("9.7", "8.2")
    assert "less 1.7 used so far, 0.1 to prepare the text and 2.1 to start, save and sum up" in slow.reason
    late = training_minutes(600, 12_000_000, PARAMETERS, 1.0)
    assert late.value == "3.0" and "the whole takes more than 12" in late.reason
    busy = training_minutes(60, 12_000_000, 5_000_000, 8.0)  # other programs slow the preparation and the end, too
    assert busy.value == "5.4" and "0.6 to prepare the text and 5.0 to start" in busy.reason


def test_what_the_command_line_says_is_not_chosen() -> None:
    choices = choose(TWO_CORES, COURSE, 1024)
    steps = {choice.flag: choice.value for choice in for_command(choices, ["--train-iters", "30", "--lr=1e-2"])}
    assert not {"train-iters", "train-minutes", "train-iters-needed", "lr-warmup-iters", "lr"} & steps.keys()
    assert steps["lr-warmup-fraction"] == "0.1" and steps["seq-length"] == "64"
    longer = {choice.flag for choice in for_command(choices, ["--train-minutes", "20", "--lr-warmup-iters", "9"])}
    assert {"train-iters", "train-iters-needed"} <= longer and not {"train-minutes", "lr-warmup-iters"} & longer


def after_ten_steps(seconds_a_step: float, **settings: float) -> tuple[int, str]:
    """What is decided if the first step takes 5 s and nine more take ``seconds_a_step`` each."""
    clock = iter([0.0, *(5 + i * seconds_a_step for i in range(10))])
    length = FittedLength(**{"minutes": 8.0, "most": 2000, "needed": 120, **settings}, now=lambda: next(clock))  # type: ignore[arg-type]
    assert [length.is_due() for _ in range(10)] == [False] * 9 + [True]
    return length.decide(10, *length.measured())


def test_an_evaluation_between_two_steps_is_no_step() -> None:
    """It takes 60 s after the fifth: they are gone, but a step takes 2 s all the same."""
    clock = iter([0.0, *(5 + 2.0 * i + 60.0 * (i > 4) for i in range(10))])
    length = FittedLength(8.0, 2000, now=lambda: next(clock))
    assert [length.is_due() for _ in range(10)][-1]
    seconds, left = length.measured()
    assert (seconds, left) == (2.0, 480 - 83)


def test_too_few_steps_are_told_with_the_minutes_that_would_do_and_none_more_than_wanted_is_taken() -> None:
    steps, sentence = after_ten_steps(9.1)
    assert steps == 53
    assert "a step takes 9.10 s: 53 steps fit into 8.0 minutes" in sentence
    assert "About 120 are needed to learn more than the frequencies" in sentence
    assert "begin anew with --train-minutes 19 (in the example: MINUTES=19 and another RUN)" in sentence
    steps, sentence = after_ten_steps(0.01, most=500)
    assert steps == 500 and sentence.endswith("and --train-iters 500 are wanted")
    assert after_ten_steps(100.0)[0] == 10  # as many are taken already


def test_the_length_is_decided_again_where_steps_become_slower() -> None:
    """Steps of 1 s fill eight minutes; after 100 of them others take 4 s, and the run ends in time all the same."""
    now = 0.0
    length = FittedLength(8.0, 2000, now=lambda: now)
    steps, taken = 2000, 0
    while taken < steps:
        now, taken = now + (1.0 if taken < 100 else 4.0), taken + 1
        if length.is_due():
            steps, _ = length.decide(taken, *length.measured())
    assert 470 < now <= 480 and steps == taken


# --- A run folder remembers its text, model and length, and refuses others ------------------------------------------


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
