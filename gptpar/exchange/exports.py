"""``--save-hf-interval``: Hugging Face folders of a run's checkpoints, written while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptpar.errors import GptparError
from gptpar.exchange.hf_export import prepare_export

FOLDER = "hf"


class Exports:
    """Exports some checkpoints of a run to ``SAVE/hf/iter_...``; the main process has one.

    It reads a checkpoint that is on the disk, so that the layout does not matter and training keeps its memory. One
    export is under way at a time. If an export fails, the run says so and goes on.

    Args:
        interval: iterations between exports.
        say: prints a line.
    """

    def __init__(self, interval: int, say: Callable[[str], None]):
        self._interval, self._say = interval, say
        self._thread: threading.Thread | None = None
        self._told = ""

    def begin(self, checkpoint: Path, iteration: int) -> None:
        """Export a checkpoint if the interval divides its iteration; call :meth:`finish` before you delete it."""
        if iteration % self._interval:
            return
        self.finish()
        target = checkpoint.parent / FOLDER / checkpoint.name
        self._thread = threading.Thread(target=self._run, args=(checkpoint, target), name="gptpar-export", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether :meth:`finish` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the export under way, if there is one, and print its outcome."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._say(self._told)

    def _run(self, checkpoint: Path, target: Path) -> None:
        started = time.perf_counter()
        try:
            prepare_export(checkpoint, target).write(target)
            self._told = f"  exported {checkpoint.name} to {target} in {time.perf_counter() - started:.2f} s"
        except Exception as error:  # whatever it is, the run goes on
            reason = str(error) if isinstance(error, GptparError | OSError) else repr(error)
            self._told = f"WARNING: no Hugging Face folder was made of {checkpoint}: {reason}"
