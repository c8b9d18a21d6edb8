"""The command line as a user runs it: train, stop, resume, generate, and be told what is wrong."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import latest, load_meta, read_tensors
from tests.e2e.commands import gptpar, losses, said_by, stepping, words, workers_of
from tests.helpers import TINY


def state(run: Path) -> dict[str, torch.Tensor]:
    path = latest(run)
    assert path is not None
    return read_tensors(path[1] if isinstance(path, tuple) else path)


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    """Six steps at once, or three, a stop and three more: the same losses, weights and moments to the last bit.

    ``test_recovery.py`` has the same of two processes.
    """
    flags = "--bf16 --train-iters 6 --hidden-dropout 0.1 --attention-dropout 0.1 --lr-warmup-iters 2"
    gptpar(f"{flags} --save {tmp_path}/whole")
    gptpar(f"{flags} --save {tmp_path}/parts --load {tmp_path}/parts --exit-interval 3")
    assert load_meta(tmp_path / "parts")["progress"]["iteration"] == 3
    output = gptpar(f"{flags} --save {tmp_path}/parts --load {tmp_path}/parts")
    assert "(iteration 3)" in output
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert whole.keys() == parts.keys() and len(whole) == 3 * 28
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    """One process and SIGTERM; two workers and a terminal's Ctrl-C, which reaches every process of the group."""
    flags = f"--train-iters 100000 --lr-decay-style constant --save {tmp_path} --load {tmp_path} --log-interval 1"
    flags += f" --nproc-per-node {workers}"
    process = stepping(words(flags), taken=5)
    os.killpg(process.pid, number)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 128 + number and f"> stopped by {number.name}" in rest and "error" not in rest
    progress = load_meta(tmp_path)["progress"]
    assert progress["iteration"] >= 5 and progress["consumed_samples"] == 2 * workers * progress["iteration"]
    again = gptpar(f"{flags} --exit-interval {progress['iteration'] + 1}")
    first = next(line for line in again.splitlines() if " iteration " in line)
    assert f"iteration {progress['iteration'] + 1:8d}/" in first


def test_a_signal_to_one_of_two_workers_stops_both(tmp_path: Path) -> None:
    """Neither may go on alone into the final evaluation, where it would wait for the other until the time-out."""
    flags = f"--train-iters 100000 --lr-decay-style constant --save {tmp_path} --log-interval 1 --eval-iters 2"
    process = stepping(words(f"{flags} --nproc-per-node 2"), taken=5)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 143 and "stopped by a signal" in rest and "on test set" not in rest
    assert load_meta(tmp_path)["progress"]["iteration"] >= 5


def test_what_stands_against_going_on_is_told_in_sentences(tmp_path: Path) -> None:
    """A run without moments: the folder is taken, tokenizer and schedule are others, moments are missed."""
    begun = f"--train-iters 2 --no-save-optim --save {tmp_path}"
    gptpar(begun)
    assert "already holds checkpoints (newest: iteration 2)" in gptpar(begun, expect=1)
    longer = f"--save {tmp_path} --load {tmp_path} --train-iters 4"
    output = gptpar(f"{longer} --vocab-size 61", expect=1)
    for told in (
        "another tokenizer (vocab_size 60 there, 61 here)",
        "decay 4 there, 8 here",
        "--override-opt-param-scheduler",
        "saved without the optimizer's moments: add --no-load-optim",
    ):
        assert told in output
    gptpar(f"{longer} --override-opt-param-scheduler --no-load-optim")
    assert len(losses(tmp_path)) == 4
    evaluated = TINY.replace("--train-iters 20 --lr 1e-2", "").replace("--eval-iters 0", "--eval-iters 3")
    output = said_by(["pretrain", *evaluated.split(), "--skip-train", "--load", str(tmp_path)])
    assert "on test set | lm loss value: " in output


def test_fp16_overflows_are_skipped_and_counted(tmp_path: Path) -> None:
    gptpar(f"--fp16 --train-iters 30 --initial-loss-scale 16777216 --hysteresis 1 --save {tmp_path}")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    skipped = sum(line["skipped_iterations"] for line in lines)
    meta = load_meta(tmp_path)
    assert skipped >= 1 and meta["progress"]["skipped_iterations"] == skipped
    assert meta["optimizer_steps"] == 30 - skipped
    assert meta["progress"]["scheduled_samples"] == 2 * (30 - skipped)
    assert lines[-1]["loss_scale"] < 16777216 and lines[-1]["lm_loss"] < lines[0]["lm_loss"]


def test_a_run_that_has_diverged_stops(tmp_path: Path) -> None:
    output = gptpar(f"--train-iters 150 --lr 1e30 --lr-decay-style constant --save {tmp_path}", expect=1)
    assert "not finite in 100 steps in a row" in output and "Traceback" not in output
    assert not list(tmp_path.glob("iter_*"))


def test_every_problem_is_told_at_once() -> None:
    output = gptpar("--hidden-size 30 --num-layer 3 --save-interval-minutes 5 --data-path nowhere/x", expect=1)
    for expected in (
        "unknown flag --num-layer; did you mean --num-layers?",
        "--hidden-size 30 is not divisible by --num-attention-heads 4: use 28 or 32",
        "--save-interval-minutes is given but --save is not",
        "nowhere/x.bin and nowhere/x.idx not found",
        "data is given twice",
    ):
        assert expected in output
    assert "has 5 problems" in output and "Traceback" not in output


def test_an_interrupted_benchmark_says_that_there_is_no_result() -> None:
    flags = TINY.replace("--train-iters 20 ", "") + " --steps 100000 --nproc-per-node 2 --breakdown"
    process = stepping(words(flags, "benchmark"), taken=1)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130
    assert re.search(r"> ended after \d+ of 10\d+ steps: there is no result", rest) and "Traceback" not in rest


@pytest.mark.parametrize(
    ("number_format", "most"),
    [("bf16", 5e-2), *(pytest.param(*one, marks=pytest.mark.long) for one in (("fp32", 2e-5), ("fp16", 2e-2)))],
)
def test_layouts_are_compared_in_other_formats_too(number_format: str, most: float) -> None:
    """The CPU optimizer's gradients may travel in 16 bits; fp16's first loss scale would overflow in each step."""
    layout = "dp2 x tp1 x pp1, ZeRO-3, CPU optimizer 0.6"
    every_ratio = layout.removesuffix(" 0.6")  # a row goes on from the checkpoint of the row before
    found = said_by(["check-layouts", f"--{number_format}", "--no-compile", "--nproc", "2", "--only", every_ratio])
    row = re.search(rf"0\.0e\+00 +(\S+) +(\S+) +(\S+) +(\S+)  {layout}\n", found)
    assert row is not None, found
    numbers = [float(number) for number in row.groups()]
    assert max(numbers) < most and max(numbers) > 0, found  # some are none: sums travel as wide as they are
