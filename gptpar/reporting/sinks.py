"""The destinations of a run's records beside the console: metrics.jsonl, TensorBoard, CSV files, Weights & Biases."""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gptpar.config import Config
from gptpar.config.sections.logging import LoggingFlags
from gptpar.errors import ConfigError, GptparError
from gptpar.reporting import csv_files, metrics_file
from gptpar.reporting.record_file import RecordFile
from gptpar.reporting.records import IterationRecord, TaskRecord, ValidationRecord
from gptpar.reporting.scalars import SAMPLES_SUFFIX, VERSUS_SAMPLES, iteration_scalars, task_scalars, validation_scalars

# (flag that needs a package, what to install)
_TENSORBOARD = ("--tensorboard-dir", "tensorboard")
_WANDB = ("--wandb-project", "gptpar[wandb]")

TENSORBOARD_FLUSH_SECONDS = 120.0
"""Seconds between writes of the event file, as in TensorBoard's own writer."""


class Sink:
    """Receives a run's iterations, and its evaluations on data and on tasks, in order; this one keeps nothing.

    Attributes:
        name: the sink's name in messages.
        keeps_records: whether records that could not be written are kept, and written when ``flush`` succeeds; one
            that raised :class:`RecordDropped` is not kept.
    """

    name: str
    keeps_records: bool

    def iteration(self, record: IterationRecord) -> None:
        """Log an iteration."""

    def validation(self, record: ValidationRecord) -> None:
        """Log an evaluation on data."""

    def task(self, record: TaskRecord) -> None:
        """Log an evaluation on a task."""

    def flush(self) -> None:
        """Write the waiting records; raises while the latest record cannot be written."""

    def close(self) -> None:
        """Write the waiting records and release files and connections."""


class JsonlSink(Sink):
    """Appends whole lines to ``metrics.jsonl`` in the run's folder.

    Args:
        folder: the run's folder, created if missing.
        resume_iteration: iteration of the checkpoint from which the run goes on, 0 for a fresh start. Before the first
            line, ``metrics_file.prepare`` prepares an existing file.
        report: takes a sentence about damage in that file.
    """

    name, keeps_records = metrics_file.FILE_NAME, True

    def __init__(self, folder: Path, resume_iteration: int = 0, report: Callable[[str], None] = print):
        path = folder / metrics_file.FILE_NAME
        self._file = RecordFile(path, prepare=partial(metrics_file.prepare, path, resume_iteration, report))

    def iteration(self, record: IterationRecord) -> None:
        self._file.append(metrics_file.json_line(metrics_file.iteration_object(record)).encode())

    def validation(self, record: ValidationRecord | TaskRecord) -> None:
        self._file.append(metrics_file.json_line(metrics_file.evaluation_object(record)).encode())

    task = validation

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _ScalarSink(Sink):
    """Names and chooses the scalars of records.

    Args:
        options: which scalars are written, and how often.
        world_size: number of processes.
    """

    def __init__(self, options: LoggingFlags, world_size: int):
        self._options, self._world_size = options, world_size

    def iteration(self, record: IterationRecord) -> None:
        if record.iteration % self._options.tensorboard_log_interval == 0:
            self._write(iteration_scalars(record, self._options, self._world_size), record)

    def validation(self, record: ValidationRecord) -> None:
        self._write(validation_scalars(record, self._options), record)

    def task(self, record: TaskRecord) -> None:
        self._write(task_scalars(record), record)

    def _write(self, scalars: dict[str, float], record: IterationRecord | ValidationRecord | TaskRecord) -> None:
        raise NotImplementedError


class TensorBoardSink(_ScalarSink):
    """Writes TensorBoard event files with Megatron-LM's scalar names, over iterations and some over samples, too.

    TensorBoard's own writer is not used: it writes in a thread, which a full disk ends for good.

    Args:
        folder: folder of the event files.
        options: which scalars are written, how often, and how many events are kept in memory before they are written.
        world_size: number of processes.
    """

    name, keeps_records = "TensorBoard", True

    def __init__(self, folder: Path, options: LoggingFlags, world_size: int = 1):
        self._events = _import("tensorboard.compat.proto.event_pb2", *_TENSORBOARD)
        self._summaries = _import("tensorboard.compat.proto.summary_pb2", *_TENSORBOARD)
        self._records = _import("tensorboard.summary.writer.record_writer", *_TENSORBOARD)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        header = self._bytes(self._events.Event(wall_time=now / 1e9, file_version="brain.Event:2"))
        queue, seconds = options.tensorboard_queue_size, TENSORBOARD_FLUSH_SECONDS
        self._file = RecordFile(folder / name, header=header, queue_size=queue, flush_seconds=seconds)
        super().__init__(options, world_size)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, scalars: dict[str, float], record: IterationRecord | ValidationRecord | TaskRecord) -> None:
        versus = {f"{name}{SAMPLES_SUFFIX}": value for name, value in scalars.items() if name in VERSUS_SAMPLES}
        events = [self._event(record.iteration, scalars)]
        if versus:
            events.append(self._event(record.consumed_samples, versus))
        self._file.append(*events)  # together, so that both wait if one cannot be written

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values under their own names."""
        self._file.append(self._event(step, values))

    def _event(self, step: int, values: Mapping[str, float]) -> bytes:
        summary = self._summaries.Summary(
            value=[self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        return self._bytes(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def _bytes(self, event: Any) -> bytes:
        record = io.BytesIO()
        self._records.RecordWriter(record).write(event.SerializeToString())
        return record.getvalue()


class CsvSink(Sink):
    """Writes DeepSpeed's curves as its CSV monitor does: a file each, a row a step, over the samples consumed.

    Args:
        resume_samples: number of samples consumed where the run goes on; later rows are dropped and written again.
        with_loss_scale: whether there is a curve of it, as with fp16.
    """

    name, keeps_records = "CSV files", True

    def __init__(self, folder: Path, resume_samples: int = 0, *, with_loss_scale: bool = False):
        names = [name for name in csv_files.CURVES if with_loss_scale or name != csv_files.LOSS_SCALE]
        self._files = {name: csv_files.open_curve(folder, name, resume_samples) for name in names}

    def iteration(self, record: IterationRecord) -> None:
        self.point(record)

    def point(self, point: csv_files.CurvePoint) -> None:
        """Add a row to each file."""
        rows = {name: csv_files.row(point.consumed_samples, csv_files.CURVES[name](point)) for name in self._files}
        self._each(lambda name, file: file.append(rows[name]))

    def flush(self) -> None:
        self._each(lambda name, file: file.flush())

    def close(self) -> None:
        self._each(lambda name, file: file.close())

    def _each(self, action: Callable[[str, RecordFile], None]) -> None:
        """Call ``action`` for every file, even if one fails; then raise the first failure."""
        problems = []
        for name, file in self._files.items():
            try:
                action(name, file)
            except OSError as error:
                problems.append(error)
        if problems:
            raise problems[0]


class WandbSink(_ScalarSink):
    """Logs to Weights & Biases under the same names; with WANDB_MODE=offline it needs no network.

    Args:
        folder: folder of its local files.
        options: which scalars are logged, and how often; the project, and the run's name, entity and group.
        world_size: number of processes.
        settings: the run's configuration, shown beside its curves.

    Raises:
        GptparError: Weights & Biases cannot be started.
    """

    name, keeps_records = "Weights & Biases", False

    def __init__(self, folder: Path, options: LoggingFlags, world_size: int, settings: Mapping[str, Any]):
        wandb = _import("wandb", *_WANDB)
        place = {"project": options.wandb_project, "name": options.wandb_exp_name}
        place |= {"entity": options.wandb_entity, "group": options.wandb_group}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(**place, dir=str(folder), config=dict(settings))
        except Exception as error:  # its exceptions have no other common base
            raise GptparError(
                f"Weights & Biases cannot be started ({error}): set WANDB_MODE=offline, or drop --wandb-project."
            ) from error
        super().__init__(options, world_size)
        self._problem: Exception | None = None

    def _write(self, scalars: dict[str, float], record: IterationRecord | ValidationRecord | TaskRecord) -> None:
        samples = {"samples vs steps": record.consumed_samples} if isinstance(record, IterationRecord) else {}
        self.log(scalars | samples, record.iteration)

    def flush(self) -> None:
        """Raise the last record's failure; only the next record shows whether the service works again."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        self._run.finish()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values under their own names."""
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # as above
            self._problem = error
            raise
        self._problem = None


def _import(module: str, flag: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"run pip install '{package}', or drop the flag"
        raise ConfigError([f"{flag} needs a package that is not installed ({error}): {remedy}"]) from error


def require_packages(*, tensorboard: bool, wandb: bool) -> None:
    """Check, before any file is changed, that ``make_sinks`` will find the packages that it needs.

    Raises:
        ConfigError: a sink's package is not installed.
    """
    if tensorboard:
        _import("tensorboard.summary.writer.record_writer", *_TENSORBOARD)
    if wandb:
        _import("wandb", *_WANDB)


def make_sinks(
    config: Config,
    *,
    run_folder: Path | None,
    place: Callable[[str | None], Path | None],
    resume_iteration: int = 0,
    resume_samples: int = 0,
    world_size: int = 1,
    report: Callable[[str], None] = print,
) -> list[Sink]:
    """The sinks whose folder or project is given.

    Args:
        place: a folder that the configuration names -> where the sink writes; ``None``: there is no such sink.

    Raises:
        ConfigError: a sink's package is not installed.
    """
    log, sinks = config.logging, list[Sink]()
    if (folder := place(log.tensorboard_dir)) is not None:
        sinks.append(TensorBoardSink(folder, log, world_size))
    if (folder := place(log.csv_dir)) is not None:
        sinks.append(CsvSink(folder, resume_samples, with_loss_scale=config.precision.fp16))
    if log.wandb_project:
        folder = Path(log.wandb_save_dir) if log.wandb_save_dir else run_folder or Path.cwd()
        sinks.append(WandbSink(folder, log, world_size, config.to_dict()))
    if run_folder is not None:
        sinks.append(JsonlSink(run_folder, resume_iteration, report))
    return sinks
