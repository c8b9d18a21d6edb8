"""The folder of one fault, and the oracles that judge its outcome."""

import random
import re
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from gptpar.checkpoint.saver import FORGIVEN
from tests.faults import commands
from tests.faults.commands import Running
from tests.faults.fault import Failed, Measured
from tests.faults.prepared import INTERVAL, STEPS, Prepared, losses, state_of, training

EXIT_LIMIT = {1: 60.0, 2: 150.0, 4: 150.0}
"""Seconds after a fault in which the processes of a run must have ended; far more than a busy machine needs."""

RUN_LIMIT = {1: 120.0, 2: 300.0, 4: 300.0}
"""Seconds for a whole run."""

_STEP = re.compile(r"iteration +(\d+)/")
_SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+)")
_FAILED = re.compile(r"WARNING: the save of iteration \d+ to ")
_BEGAN = re.compile(r"saving checkpoint at iteration +(\d+)")
_LOADED = re.compile(r"loaded [^()]+ \(iteration (\d+)\)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Place:
    """A fresh folder for one fault.

    Args:
        folder: made here, and removed by :meth:`close`.
        prepared: corpora, tokenizer and runs that all faults share.
        workers: of the disturbed runs.
        seed: of everything random.
    """

    def __init__(self, folder: Path, prepared: Prepared, workers: int, seed: int):
        self.folder, self.prepared, self.workers = folder, prepared, workers
        self.random = random.Random(seed)
        self.reference = prepared.reference(workers)
        self.run_folder = folder / "run"
        self.marker = folder / "executed"
        self.notes: list[str] = []
        self._started: list[Running] = []
        folder.mkdir(parents=True)

    def with_data(self) -> "Place":
        """Corpus and tokenizer, shared with all other faults."""
        (self.folder / "data").symlink_to(self.prepared.folder / "data")
        return self

    def with_own_data(self) -> "Place":
        """The same, as copies that the fault may change."""
        shutil.copytree(self.prepared.folder / "data", self.folder / "data")
        return self

    def with_stopped_run(self) -> "Place":
        """A copy of a run that was stopped in the middle, with its own corpus, tokenizer and index cache."""
        shutil.copytree(self.prepared.stopped, self.folder, dirs_exist_ok=True)
        return self

    def newest_checkpoint(self) -> Path:
        return max(self.run_folder.glob("iter_*"))

    def start(self, words: Sequence[str] | str, **options: Any) -> Running:
        """Start a command in the folder; options as in :func:`tests.faults.commands.start`."""
        output = options.pop("output", self.folder / f"log-{len(self._started)}")
        argv = words.split() if isinstance(words, str) else list(words)
        running = commands.start(argv, output, folder=self.folder, mark=str(self.folder), **options)
        self._started.append(running)
        return running

    def train(self, *more: str, **options: Any) -> Running:
        """Begin the run, or go on with it: always the same command."""
        return self.start([*training(self.workers), *more], **options)

    def train_to_end(self, *more: str, limit: float | None = None, **options: Any) -> Running:
        """Train to the end of the command, which has to keep to what all commands keep to.

        Args:
            limit: seconds that it may take (default: those of a whole run).
        """
        running = self.train(*more, **options)
        self.ended(running, limit or RUN_LIMIT[self.workers])
        return running

    def say(self, words: Sequence[str] | str, **options: Any) -> Running:
        """Run a command to its end, which has to keep to what all commands keep to."""
        running = self.start(words, **options)
        self.ended(running, RUN_LIMIT[1])
        return running

    def note(self, what: str) -> None:
        """Remember what was done, for the verdict."""
        self.notes.append(what)

    def close(self) -> None:
        """End what is left, and remove the folder."""
        for running in self._started:
            running.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """What all commands have said."""
        return "\n".join(f"--- command {i}: {r.status}\n{r.text()}" for i, r in enumerate(self._started))

    # What is asked of every command.

    def over(self, running: Running, limit: float | None = None) -> float:
        """Wait for the end of all its processes; returns the seconds it took."""
        began, limit = time.monotonic(), limit or EXIT_LIMIT[self.workers]
        if not running.wait(limit):
            left = running.others() or [running.pid]
            raise Failed("hang", f"not ended after {limit:g} s; processes left: {left}: {running.text()[-300:]}")
        return time.monotonic() - began

    def ended(self, running: Running, limit: float | None = None, *, killed: bool = False, mute: bool = False) -> float:
        """Wait for the end of all its processes; returns the seconds it took.

        It printed no traceback and no control character, ran no foreign code, and died of no signal.

        Args:
            killed: whether the fault has sent it a signal.
            mute: whether the fault has taken its output away, so that no error can be read.
        """
        seconds, text = self.over(running, limit), running.text()
        self.no_foreign_code()
        if "Traceback (most recent call last)" in text:
            raise Failed("traceback", text[text.index("Traceback (most") :][-700:])
        if found := _CONTROL.search(text):
            raise Failed("code executed", f"{found[0]!r} reached the terminal: {text[: found.end()][-100:]!r}")
        if not killed and running.status is not None and running.status < 0:
            raise Failed("traceback", f"died of signal {-running.status}: {text[-300:]}")
        if running.status in (1, 2, 74) and not mute and "error: " not in text and "DAMAGED" not in text:
            raise Failed("traceback", f"exit status {running.status} and no error: {text[-300:]}")
        return seconds

    def no_foreign_code(self) -> None:
        """Nothing that the fault wrote was executed."""
        if self.marker.exists():
            raise Failed("code executed", f"{self.marker} exists")

    def expect(self, running: Running, statuses: Collection[int | None] = (0,), outcome: str = "not whole") -> None:
        """A command that has ended has one of these exit statuses."""
        if running.status not in statuses:
            raise Failed(outcome, f"exit status {running.status}: {running.text()[-500:]}")

    # What is asked of a run that goes on.

    def finishes(self, *more: str, log: bool = True, **options: Any) -> Running:
        """The same command finishes the run, as if nothing had happened; ``log``: so does its ``metrics.jsonl``."""
        running = self.train_to_end(*more, **options)
        self.expect(running)
        self.equals_undisturbed(log=log)
        return running

    def finishes_nearly(self, *more: str) -> None:
        """The run finishes in another layout: its losses are the undisturbed ones but for rounding."""
        running = self.train_to_end(*more, limit=RUN_LIMIT[4])
        self.expect(running)
        found, wanted = losses(self.run_folder), self.reference.losses
        if far := [i for i in wanted if abs(found.get(i, 0.0) - wanted[i]) > 1e-3]:
            raise Failed("wrong continuation", f"other losses at {far[:5]}: {running.text()[-300:]}")

    def goes_on(self, before: Sequence[Running] = (), *, saved: bool = False, seconds: float = 0.0) -> Measured:
        """The same command finishes the run, and trains few steps again.

        Args:
            before: the disturbed commands of this run, which ended before now.
            saved: whether the last of them had time to save everything.
            seconds: that it took to end.
        """
        running = self.finishes()
        lost = self._lost([one.text() for one in before], self.resumed_at(running), saved)
        return Measured(lost, seconds)

    def _lost(self, before: Sequence[str], resumed: int, saved: bool) -> int:
        """Number of steps that are trained again; too many are a failure."""
        saved_at, reached, began = (
            max((_last(each, one) for one in before), default=0) for each in (_SAVED, _STEP, _BEGAN)
        )
        if saved_at > resumed:
            raise Failed("silent loss", f"iteration {saved_at} was said to be saved; it went on from {resumed}")
        lost = max(0, reached - resumed)
        # A save that was under way when the fault came may have gone on behind the training.
        failed = max((len(_FAILED.findall(one)) for one in before), default=0)
        allowed = 0 if saved else INTERVAL * (1 + min(failed, FORGIVEN)) + (reached - began if began > saved_at else 0)
        if lost > allowed:
            raise Failed("work lost", f"{lost} steps, from {resumed} to {reached}; {allowed} are allowed")
        return lost

    def equals_undisturbed(self, *, log: bool = True) -> None:
        """The finished run's state is bit for bit the undisturbed one's, and so is each loss in its log."""
        try:
            state = commands.asked(state_of, str(self.run_folder), STEPS)
        except Exception as error:
            raise Failed("not whole", f"no checkpoint of iteration {STEPS}: {str(error)[-200:]}") from None
        if state != self.reference.state:
            raise Failed("wrong continuation", "the final state differs from the undisturbed run's")
        if log and (found := losses(self.run_folder)) != (wanted := self.reference.losses):
            first = min(key for key in found | wanted if found.get(key) != wanted.get(key))
            seen = f"metrics.jsonl, iteration {first}: {found.get(first)}, undisturbed {wanted.get(first)}"
            raise Failed("wrong continuation", seen)

    # Moments.

    def steps_told(self, running: Running) -> int:
        """The last iteration that a run has printed."""
        return _last(_STEP, running.text())

    def saved_at(self, running: Running) -> int:
        """The last iteration that a run said to be saved."""
        return _last(_SAVED, running.text())

    def resumed_at(self, running: Running) -> int:
        """The iteration from which a run went on."""
        return STEPS if "nothing left to train" in running.text() else _last(_LOADED, running.text())

    def moment(self, running: Running) -> str:
        """Let a run go on until a random moment of its start-up, training or last save; returns which of them."""
        if self.random.random() < 0.2:
            running.sleep(self.random.uniform(0, self.reference.start_seconds))
            return "start"
        running.until(lambda: "iteration        1/" in running.text(), RUN_LIMIT[self.workers])
        running.sleep(self.random.uniform(0, self.reference.train_seconds))
        return "training"

    def operation(self) -> dict[str, Any]:
        """A random file operation of a random rank below the run folder, for :mod:`tests.faults.hook.disturb`."""
        rank = self.random.choice([rank for rank, count in enumerate(self.reference.operations) if count])
        number = self.random.randint(1, self.reference.operations[rank])
        return {"under": str(self.run_folder), "rank": None if self.workers == 1 else rank, "number": number}


def _last(pattern: re.Pattern[str], text: str) -> int:
    """The last number that a pattern finds; 0 for none."""
    found = pattern.findall(text)
    return int(found[-1]) if found else 0
