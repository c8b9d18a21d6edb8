"""A full disk, a removed folder, a closed terminal or a dead service takes records at most, never the run."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptpar.config.sections.logging import LoggingConfig
from gptpar.reporting.guards import GuardedSink
from gptpar.reporting.metrics_file import read_metrics
from gptpar.reporting.record_file import RecordFile
from gptpar.reporting.records import ValidationRecord
from gptpar.reporting.sinks import JsonlSink, TensorBoardSink
from tests.unit.reporting.records import read_tensorboard, record


@contextlib.contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """As on a full disk, a write goes as far as there is room and then fails (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_cuts_no_record_and_leaves_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = RecordFile(path, header=b"head.")
    with files_end_at(20):
        file.append(b"0123456789")
        with pytest.raises(OSError, match="File too large"):
            file.append(b"abcdefghij")
        assert path.read_bytes() == b"head.0123456789"
        file.append(b"x")  # waits
        with pytest.raises(OSError, match="File too large"):
            file.flush()
    file.append(b"y")
    assert path.read_bytes() == b"head.0123456789"
    file.flush()
    file.append(b"z")
    file.close()
    assert path.read_bytes() == b"head.0123456789abcdefghijxyz"


def test_metrics_are_told_of_once_and_complete_after_the_next_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    sink = GuardedSink(JsonlSink(tmp_path), said.append)
    path = tmp_path / "metrics.jsonl"
    with files_end_at(800):
        for iteration in range(1, 6):
            sink.iteration(record(iteration))
        assert [o["iteration"] for o in read_metrics(path)] == [1, 2] and path.read_text().endswith("}\n")
        sink.flush()
    sink.validation(ValidationRecord(5, 40, 5120, 4.5))
    sink.flush()
    sink.iteration(record(6))
    sink.close()
    assert [o["iteration"] for o in read_metrics(path)] == [1, 2, 3, 4, 5, 5, 6]
    assert said == [
        "metrics.jsonl cannot be written at iteration 3 (File too large); the run goes on without it, and tries "
        "again at each checkpoint",
        "metrics.jsonl is written again; nothing is missing since then",
    ]


def test_tensorboard_goes_on_after_a_full_disk_and_the_end_tells_what_is_missing(tmp_path: Path) -> None:
    said: list[str] = []
    sink = GuardedSink(TensorBoardSink(tmp_path, LoggingConfig(tensorboard_queue_size=1)), said.append)
    with files_end_at(2000):
        for iteration in range(1, 21):
            sink.iteration(record(iteration))
    kept = [step for step, _ in read_tensorboard(tmp_path)["lm loss vs samples"]]
    assert kept == list(range(8, 8 * len(kept) + 8, 8)) and 2 < len(kept) < 20
    sink.flush()
    scalars = read_tensorboard(tmp_path)
    assert [step for step, _ in scalars["lm loss"]] == list(range(1, 21))
    assert [step for step, _ in scalars["lm loss vs samples"]] == list(range(8, 161, 8))
    with files_end_at(2000):
        sink.iteration(record(21))
        sink.close()
    assert [text.split(" (")[0] for text in said] == [
        f"TensorBoard cannot be written at iteration {len(kept) + 1}",
        "TensorBoard is written again; nothing is missing since then",
        "TensorBoard cannot be written at iteration 21",
        "TensorBoard lacks records, at first of iteration 21",
    ]


def test_a_full_disk_at_the_start_ends_no_run(tmp_path: Path) -> None:
    """Neither TensorBoard's header can be written nor the history cut where the run goes on."""
    history, said = tmp_path / "metrics.jsonl", list[str]()
    history.write_text(text := '{"iteration": 1}\noops\n{"iteration": 2}\n{"iteration": 3}\n')
    with files_end_at(10):
        sinks = [TensorBoardSink(tmp_path / "events", LoggingConfig()), JsonlSink(tmp_path, 2)]
        guarded = [GuardedSink(sink, said.append) for sink in sinks]
        for sink in guarded:
            sink.iteration(record(3))
        assert history.read_text() == text and {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "events"}
    for sink in guarded:
        sink.flush()
        sink.close()
    assert [o["iteration"] for o in read_metrics(history)] == [1, 2, 3]
    assert (tmp_path / "metrics.damaged-1.jsonl").read_text() == text
    scalars = read_tensorboard(tmp_path / "events")
    assert [scalars[name][0][0] for name in ("lm loss", "lm loss vs samples")] == [3, 24]
    names = ("TensorBoard", "metrics.jsonl")
    assert [text.split(" (")[0] for text in said] == [
        *(f"{name} cannot be written at the start" for name in names),
        *(f"{name} is written again; nothing is missing since then" for name in names),
    ]
