"""The monitors of DeepSpeed's configuration: an engine's loss, learning rate and loss scale as curves over samples.

Source of names and axes: deepspeed/runtime/engine.py and deepspeed/monitor, DeepSpeed 0.19. Unlike DeepSpeed's, the
three numbers of a step stand at the same place, the samples that were consumed when the step had ended.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakMethod

from gptpar.config.sections.logging import LoggingFlags
from gptpar.engine.readings import Readings
from gptpar.errors import GptparError
from gptpar.reporting import event_files
from gptpar.reporting.csv_files import curves_of
from gptpar.reporting.guards import print_warning
from gptpar.reporting.sinks import CsvSink, TensorBoardSink, WandbSink


def monitor_problems(logging: LoggingFlags) -> Iterator[str]:
    """A sentence about a package that is not installed."""
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        yield (
            "wandb is enabled, and the package wandb is not installed: run pip install 'gptpar[wandb]', or set "
            "wandb.enabled to false."
        )


@dataclass(frozen=True)
class Point:
    """A step's numbers; ``samples_before`` were consumed when it began."""

    samples_before: int
    consumed_samples: int
    learning_rate: float
    loss_scale: float
    lm_loss: float | None = None


LAST_STEP_SECONDS = 10.0
"""The longest time that a process waits for its last step, to write it, when it ends."""


class Monitor:
    """Writes the curves of one engine. A failure to write is reported once; it does not end the training.

    Files are opened at the first step, when it is known where the training goes on: what they hold of later samples,
    which will be written again, is dropped. The same happens when a checkpoint takes the engine back.

    Args:
        logging: the folders of CSV and TensorBoard files, and the project at Weights & Biases.
        with_loss_scale: whether there is a curve of the loss scale.
        warn: takes a sentence.
    """

    def __init__(self, logging: LoggingFlags, *, with_loss_scale: bool, warn: Callable[[str], None] = print_warning):
        self._logging, self._with_loss_scale, self._warn = logging, with_loss_scale, warn
        self._csv: CsvSink | None = None
        self._board: TensorBoardSink | None = None
        self._wandb: WandbSink | None = None
        self._last = -1
        self._failed: set[str] = set()
        if logging.wandb_project:
            self._try("wandb", self._start_wandb)

    def write(self, point: Point) -> None:
        """Write a step's numbers."""
        if self._last < 0 or point.consumed_samples <= self._last:
            self._close_files()
            self._open_files(point.samples_before)
        self._last = point.consumed_samples
        values = curves_of(point, with_loss_scale=self._with_loss_scale)
        csv, board, wandb = self._csv, self._board, self._wandb
        if csv is not None:
            self._try("csv_monitor", lambda: csv.point(point))
        if board is not None:
            self._try("tensorboard", lambda: board.scalars(point.consumed_samples, values))
        if wandb is not None:
            self._try("wandb", lambda: wandb.log(values, point.consumed_samples))

    def finish(self, readings: Readings | None, read: Callable[[], None]) -> None:
        """Have the last step's numbers read, if the device has soon done it, and end.

        Args:
            readings: of that step, if they are not read.
            read: reads them, and writes the step.
        """
        with contextlib.suppress(GptparError):  # whoever else asks for the numbers gets the error
            if readings is not None:
                readings.event.wait(LAST_STEP_SECONDS)
            read()
        self._close_files()
        if self._wandb is not None:
            self._try("wandb", self._wandb.close)
            self._wandb = None

    def _start_wandb(self) -> None:
        self._wandb = WandbSink(Path.cwd(), self._logging, 1, {})

    def _open_files(self, samples: int) -> None:
        if self._logging.csv_dir is not None:
            self._csv = CsvSink(Path(self._logging.csv_dir), samples, with_loss_scale=self._with_loss_scale)
        if self._logging.tensorboard_dir is not None:
            folder = Path(self._logging.tensorboard_dir)
            if samples or self._last >= 0:  # a new engine finds the events of other runs
                self._try("tensorboard", lambda: event_files.cut_after(folder, samples, samples))
            self._board = TensorBoardSink(folder, replace(self._logging, tensorboard_queue_size=1))

    def _close_files(self) -> None:
        for name, sink in (("csv_monitor", self._csv), ("tensorboard", self._board)):
            if sink is not None:
                self._try(name, sink.close)
        self._csv = self._board = None

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # wandb's have no common base
            if name not in self._failed:
                self._warn(f"the curves of {name} cannot be written ({error}); training goes on.")
            self._failed.add(name)


def make_monitor(
    logging: LoggingFlags, *, with_loss_scale: bool, warn: Callable[[str], None], end: Callable[[], None]
) -> Monitor | None:
    """The monitor of an engine, if the configuration has any.

    Args:
        logging, with_loss_scale, warn: as :class:`Monitor`'s.
        end: the engine's method that ends it; called when the process ends, if the engine is still there.
    """
    if not logging.draws_curves:
        return None
    method = WeakMethod(end)

    def at_exit() -> None:
        if (end_monitor := method()) is not None:
            end_monitor()

    atexit.register(at_exit)
    return Monitor(logging, with_loss_scale=with_loss_scale, warn=warn)
