"""Tasks in a run: when they are evaluated, what is written, and that training does not notice."""

import json
import signal
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, read_manifest, read_tensors
from gptpar.cli.pretrain import pretrain, start_checks
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines


@pytest.fixture
def files(tmp_path: Path) -> str:
    names = ("questions.jsonl", QUESTIONS), ("texts.jsonl", TEXTS)
    return " ".join(write_lines(tmp_path / name, lines) for name, lines in names)


def run(save: Path, flags: str) -> signal.Signals | None:
    config, derived = resolve(parse_flags([*BYTES.split(), *flags.split(), "--save", str(save)]), 1, more=start_checks)
    return pretrain(config, derived, ())


def lines_of(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def weights_of(save: Path) -> dict[str, torch.Tensor]:
    (_, path), *_ = find_checkpoints(save)
    return read_tensors(path, list(read_manifest(path).tensors))


@pytest.mark.slow
def test_what_a_run_evaluates_changes_no_bit_of_it(tmp_path: Path, files: str) -> None:
    dropout = "--hidden-dropout 0.1"  # its masks are functions of the iteration, not of what is drawn in between
    run(tmp_path / "a", dropout)
    run(tmp_path / "b", f"{dropout} --eval-tasks {files} --eval-tasks-interval 1")
    plain, evaluated = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    assert plain.keys() == evaluated.keys() and all(torch.equal(plain[name], evaluated[name]) for name in plain)
    losses = [line["lm_loss"] for line in lines_of(tmp_path / "a")]
    assert losses == [line["lm_loss"] for line in lines_of(tmp_path / "b") if "lm_loss" in line] and len(losses) == 4


def test_scores_are_written_at_their_interval_and_at_the_end(
    tmp_path: Path, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", f"--eval-tasks {files} --eval-tasks-interval 3 --eval-limit 3 --train-iters 4")
    found = [line for line in lines_of(tmp_path / "a") if "task" in line]
    assert [(line["iteration"], line["task"], line["num_items"]) for line in found] == [
        *((3, "questions", 3), (3, "texts", 2)),
        *((4, "questions", 3), (4, "texts", 2)),
    ]
    assert found[0].keys() >= {"acc", "acc_norm", "acc_bytes", "acc_stderr", "seconds", "num_tokens"}
    assert 5 < found[1]["bits_per_byte"] < 12 and found[0]["seconds"] > 0
    said = capsys.readouterr().out
    assert " questions at iteration 3 | acc: " in said and " texts at iteration 4 | bits_per_byte: " in said
    assert "3 items in " in said and " tokens/s)" in said
