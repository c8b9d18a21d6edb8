"""Where a run's records go: ``metrics.jsonl``, TensorBoard and Weights & Biases."""

import json
import re
from pathlib import Path

import pytest

from gptpar.config.sections.logging import LoggingConfig
from gptpar.errors import GptparError
from gptpar.reporting.event_files import cut_after, event_files
from gptpar.reporting.metrics_file import TAIL_BYTES, iteration_object, json_line, last_iteration, prepare, read_metrics
from gptpar.reporting.records import MemoryStats, TaskRecord, ValidationRecord
from gptpar.reporting.sinks import CsvSink, JsonlSink, TensorBoardSink
from tests.unit.reporting.records import read_tensorboard, record


def write(folder, iterations, resume_iteration=0):
    sink = JsonlSink(folder, resume_iteration)
    for iteration in iterations:
        sink.iteration(record(iteration))
    sink.close()


def test_jsonl_object_of_an_iteration_and_of_an_evaluation(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "run")
    sink.iteration(record(3))
    sink.validation(ValidationRecord(3, 24, 3072, 4.5))
    sink.validation(ValidationRecord(3, 24, 3072, 4.25, split="test"))
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()  # on disk before close
    assert all(re.fullmatch("[0-9a-f]{8}", json.loads(line)["crc32"]) for line in lines)
    assert read_metrics(tmp_path / "new" / "run" / "metrics.jsonl") == [
        {
            "iteration": 3,
            "consumed_samples": 24,
            "consumed_tokens": 3072,
            "lm_loss": 4.7,
            "grad_norm": 2.0,
            "learning_rate": 1e-4,
            "iteration_time_ms": 250.0,
            "tokens_per_s": 4096.0,
            "mfu": 0.5,
            "mfu_causal": 0.4,
            "global_batch_size": 8,
            "loss_scale": 1.0,
            "skipped_iterations": 0,
            "nan_iterations": 0,
        },
        {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 3072, "validation_loss": 4.5},
        {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 3072, "test_loss": 4.25},
    ]
    sink.close()


def test_resume_keeps_the_evaluation_at_the_checkpoint_and_drops_what_is_later_and_a_torn_line(tmp_path):
    write(tmp_path, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"iteration": 5, "validation_loss": 4.0}\n{"iteration": 6, "lm_l')
    write(tmp_path, range(6, 9), resume_iteration=5)
    write(tmp_path, range(6, 8), resume_iteration=5)
    objects = read_metrics(path)
    assert [o["iteration"] for o in objects] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert objects[5]["validation_loss"] == 4.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # no temporary file left


@pytest.mark.parametrize("damage", ["oops", '{"lm_loss": 1.0}'])
def test_resume_keeps_the_readable_lines_of_a_damaged_file_and_the_file(tmp_path, damage):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_text(text := f'{{"iteration": 1}}\n{damage}\n{damage}\n{{"iteration": 2}}\n{{"iteration": 3}}\n')
    with pytest.raises(GptparError, match=r"metrics\.jsonl, line 2 is not .*delete the line"):
        read_metrics(path)
    for number in (1, 2):
        path.write_text(text)
        JsonlSink(tmp_path, resume_iteration=2, report=said.append).close()
        assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
        aside = tmp_path / f"metrics.damaged-{number}.jsonl"
        assert aside.read_text() == text
        assert said[-1].startswith(f"{path}: line 2 is not ") and "and 1 more; the readable lines" in said[-1]
        assert said[-1].endswith(f"the file as it was is {aside}")
    assert len(said) == 2 and len(list(tmp_path.iterdir())) == 3


def test_a_flipped_digit_is_found(tmp_path):
    write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace('"lm_loss": 4', '"lm_loss": 5'), lines[2]]))
    with pytest.raises(GptparError, match="line 2 is not as it was written, by its CRC-32"):
        read_metrics(path)
    said = []
    prepare(path, 3, said.append)
    assert path.read_text() == lines[0] + lines[2] and "line 2 is not as it was written" in said[0]


def test_the_last_iteration_is_read_from_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_iteration(path) is None
    path.write_text("".join(json_line(iteration_object(record(i))) for i in range(1, 301)) + '{"iter')
    assert path.stat().st_size > TAIL_BYTES and last_iteration(path) == 300
    for damage in ("", '{"iteration": 3}', "oops\n", "\0" * 100_000):
        path.write_text(damage)
        assert last_iteration(path) is None


def test_tensorboard_default_names_are_megatrons(tmp_path):
    sink = TensorBoardSink(tmp_path, LoggingConfig(), world_size=4)
    sink.iteration(record(1))
    sink.iteration(record(2, lm_loss=None, memory=MemoryStats(1, 2, 3, 4)))
    sink.validation(ValidationRecord(2, 16, 2048, 4.5))
    sink.close()
    scalars = read_tensorboard(tmp_path)
    names = ["learning-rate", "lm loss", "loss-scale", "grad-norm", "lm loss validation"]
    assert set(scalars) == {*names, *(f"{name} vs samples" for name in names)}
    assert scalars["lm loss"] == [(1, pytest.approx(4.9))]
    assert scalars["lm loss vs samples"] == [(8, pytest.approx(4.9))]
    assert scalars["loss-scale"] == [(1, 1.0), (2, 1.0)]
    assert scalars["lm loss validation vs samples"] == [(16, 4.5)]


def test_tensorboard_flags_add_and_drop_scalars(tmp_path):
    options = LoggingConfig(
        log_timers_to_tensorboard=True,
        log_learning_rate_to_tensorboard=False,
        log_batch_size_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
        log_world_size_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        tensorboard_queue_size=1,
    )
    sink = TensorBoardSink(tmp_path, options, world_size=4)
    sink.iteration(record(1, memory=MemoryStats(1, 2, 3, 4), num_zeros=7, params_norm=9.0, skipped_samples=8))
    sink.validation(ValidationRecord(1, 8, 1024, 3.0))
    sink.close()
    versus = {"lm loss", "world-size", "grad-norm", "num-zeros", "params-norm"}
    versus |= {"lm loss validation", "lm loss validation ppl"}
    kinds = ("reserved-bytes", "allocated-bytes", "max-allocated-bytes", "allocated-count")
    alone = {f"mem-{kind}" for kind in kinds}
    alone |= {"iteration-time", "throughput", "tokens-per-second", "mfu", "mfu-causal"}
    alone |= {"skipped-train-samples"}
    scalars = read_tensorboard(tmp_path)
    assert set(scalars) == versus | {f"{name} vs samples" for name in versus} | alone
    assert scalars["iteration-time"] == [(1, 0.25)]
    assert scalars["throughput"] == [(1, 3.5)]
    assert scalars["world-size"] == [(1, 4.0)]
    assert scalars["mem-max-allocated-bytes"] == [(1, 3.0)]
    assert scalars["lm loss validation ppl"] == [(1, pytest.approx(20.0855, rel=1e-5))]


# --- DeepSpeed's CSV files: names, headers, rows, and what a run that goes on leaves of them ------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_curve_is_a_file_of_samples_and_values(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "out" / "job", with_loss_scale=True)
    sink.iteration(record(1, loss_scale=65536.0, lm_loss=float("nan")))
    sink.iteration(record(2, loss_scale=32768.0, learning_rate=2.5e-5))
    assert contents(tmp_path / "out" / "job") == {  # on the disk before it is closed
        "Train_Samples_loss_scale.csv": b"step,loss_scale\r\n8,65536.0\r\n16,32768.0\r\n",
        "Train_Samples_lr.csv": b"step,lr\r\n8,0.0001\r\n16,2.5e-05\r\n",
        "Train_Samples_train_loss.csv": b"step,train_loss\r\n8,nan\r\n16,4.8\r\n",
    }
    sink.close()


def test_a_run_that_goes_on_drops_the_rows_that_it_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "Train_Samples_lr.csv"
    path.write_bytes(b"step,lr\r\n8,0.1\r\n16,0.2\r\n24,0.3\r\n32,0.")
    sink = CsvSink(tmp_path, resume_samples=16)
    sink.iteration(record(3))
    sink.close()
    assert path.read_bytes() == b"step,lr\r\n8,0.1\r\n16,0.2\r\n24,0.0001\r\n"
    sink = CsvSink(tmp_path)  # a new run: as with DeepSpeed, its rows follow
    sink.iteration(record(1))
    sink.close()
    assert path.read_bytes().endswith(b"\r\n24,0.0001\r\n8,0.0001\r\n")


# --- What a run that goes on leaves of TensorBoard's events ---------------------------------------------------------


def written(folder: Path, iterations: range) -> None:
    sink = TensorBoardSink(folder, LoggingConfig())
    for iteration in iterations:
        sink.iteration(record(iteration))
        sink.validation(ValidationRecord(iteration, 8 * iteration, 1024 * iteration, 4.0))
        if iteration % 4 == 0:  # its scores are over iterations alone
            sink.task(TaskRecord("arc", {"acc": 0.5}, 10, 100, 1.0, iteration, 8 * iteration, 1024 * iteration))
    sink.close()


def steps(folder: Path, name: str) -> list[int]:
    """In order: files written within one second are read in the order of their writers' numbers as texts."""
    return sorted(step for step, _ in read_tensorboard(folder)[name])


@pytest.mark.slow
@pytest.mark.parametrize("last", [13, 20])
def test_events_are_cut_on_both_axes_and_the_run_goes_on_behind(tmp_path: Path, last: int) -> None:
    written(tmp_path, range(1, 16))
    written(tmp_path, range(16, 31))
    cut_after(tmp_path, last, 8 * last)
    assert len(event_files(tmp_path)) == (1 if last <= 15 else 2)
    assert steps(tmp_path, "arc/acc") == list(range(4, last + 1, 4))
    for name in ("lm loss", "grad-norm", "lm loss validation"):
        assert steps(tmp_path, name) == list(range(1, last + 1))
        assert steps(tmp_path, f"{name} vs samples") == list(range(8, 8 * last + 1, 8))
    written(tmp_path, range(last + 1, last + 11))
    assert steps(tmp_path, "lm loss") == list(range(1, last + 11))
    assert steps(tmp_path, "lm loss vs samples") == list(range(8, 8 * last + 81, 8))


def test_events_without_values_are_no_later_steps(tmp_path: Path) -> None:
    """Earlier versions wrote one over samples with each task's scores."""
    sink = TensorBoardSink(tmp_path, LoggingConfig())
    for step in (1, 2):
        sink.scalars(step, {"lm loss": 1.0})
        sink.scalars(8 * step, {})
    sink.scalars(3, {"lm loss": 1.0})
    sink.close()
    cut_after(tmp_path, 2, 16)
    assert steps(tmp_path, "lm loss") == [1, 2]
