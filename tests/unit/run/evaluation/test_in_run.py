"""Tasks in a run: when they are evaluated, what is written, and that training does not notice."""

from pathlib import Path

import pytest

from gptpar.reporting.metrics_file import read_metrics
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines
from tests.unit.run.whole_runs import assert_same_tensors, losses, run


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
