from pathlib import Path

import pytest

from gptpar.reporting.event_files import cut_after, event_files
from gptpar.reporting.records import ValidationRecord
from gptpar.reporting.scalars import ScalarOptions
from gptpar.reporting.sinks import TensorBoardSink
from tests.unit.reporting.records import read_tensorboard, record


def write(folder: Path, iterations: range) -> None:
    sink = TensorBoardSink(folder, ScalarOptions())
    for iteration in iterations:
        sink.iteration(record(iteration))
        sink.validation(ValidationRecord(iteration, 8 * iteration, 1024 * iteration, 4.0))
    sink.close()


def steps(folder: Path, name: str) -> list[int]:
    """In order: files written within one second are read in the order of their writers' numbers as texts."""
    return sorted(step for step, _ in read_tensorboard(folder)[name])


@pytest.mark.parametrize("last", [129, 200])
def test_events_are_cut_on_both_axes_and_the_run_goes_on_behind(tmp_path: Path, last: int) -> None:
    write(tmp_path, range(1, 151))
    write(tmp_path, range(151, 301))
    cut_after(tmp_path, last, 8 * last)
    assert len(event_files(tmp_path)) == (1 if last <= 150 else 2)
    for name in ("lm loss", "grad-norm", "lm loss validation"):
        assert steps(tmp_path, name) == list(range(1, last + 1))
        assert steps(tmp_path, f"{name} vs samples") == list(range(8, 8 * last + 1, 8))
    write(tmp_path, range(last + 1, last + 11))
    assert steps(tmp_path, "lm loss") == list(range(1, last + 11))
    assert steps(tmp_path, "lm loss vs samples") == list(range(8, 8 * last + 81, 8))
