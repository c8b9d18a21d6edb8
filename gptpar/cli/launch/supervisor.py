"""Starts the workers of one machine, watches them, and starts them again after a death.

A restart ends all workers. When one worker has died, the others wait in a collective that cannot finish, and neither
NCCL nor gloo ends the wait. SIGKILL ends these workers at once, and the system has taken back their GPU memory when it
reports their end. New workers go on from the newest whole state, which lies in this machine's memory or on the disk. So
a restart is a resume, and its numbers are those of a run that was not interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.job import LaunchJob
from gptpar.cli.launch.relay import Relay, patience, print_message
from gptpar.cli.launch.rendezvous import LocalStore
from gptpar.cli.launch.template import Template
from gptpar.cli.launch.worker import LAUNCHER_VARIABLE
from gptpar.system.activity import FOLDER_VARIABLE, START, SignsOfLife, forget_records, last_activity
from gptpar.system.processes import is_stopped
from gptpar.system.restart import MEMORY_VARIABLE, Restart, forget_final, is_final

POLL_SECONDS = 0.05
LIFE_SECONDS = 0.5
"""Seconds between two looks for a sign of life."""

OTHERS_SECONDS = 0.1
"""Seconds to wait for the cause of an exception: another worker's death, which the system reports a moment later."""

END_SECONDS = 10.0
"""Seconds that the other workers get to end after a failure without a restart."""


class Supervisor:
    """Runs a job's workers to their end.

    The state of an object; the relay's thread reads ``_running`` and ``holds``:

    =============  =================================================================================================
    ``_running``   rank -> process of the workers that have not ended
    ``_groups``    process groups of all workers since the last :meth:`_end`: their helpers may outlive them
    ``_count``     number of workers; a restart may go on with fewer
    ``_restart``   the restarts so far, which workers find in their environment
    ``_store``     the store of the workers' rendezvous, a new one for each start
    ``_template``  the process from which workers are forked; ``None``: each starts an interpreter
    ``_alive``     the time, on the monotonic clock, at which all workers still lived
    =============  =================================================================================================

    Args:
        job: what to run.
        folder: for the workers' records of activity.
        memory: a folder in this machine's memory for the workers; ``None`` where there is none.

    Attributes:
        relay: of requests to stop.
        holds: whether the workers have come so far that there is something to save.
    """

    def __init__(self, job: LaunchJob, folder: Path, memory: Path | None):
        self._job, self._folder, self._count = job, folder, job.count
        self._running: dict[int, int] = {}
        self._groups: list[int] = []
        self._restart = Restart(limit=job.max_restarts)
        self._store: LocalStore | None = None
        self._alive = 0.0
        self.holds = False
        self.relay = Relay(folder, patience(), self, job.program)
        self._environment = {
            **os.environ,
            **({} if memory is None else {MEMORY_VARIABLE: str(memory)}),
            FOLDER_VARIABLE: str(folder),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        self._template: Template | None = None

    def run(self) -> Failure | None:
        """Start the workers, and again while restarts are left; returns the failure that ended them, if one did."""
        job, before = self._job, None
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, END_SECONDS)
            if job.is_forked:
                self._template = stack.enter_context(Template(job.program, job.modules, self._environment))
            while True:
                self._start()
                failure = self._watch()
                noticed = time.monotonic()
                if failure is None:
                    self._groups.clear()
                    return None
                if (remark := self._why_not_again(failure, before)) is not None:
                    return replace(failure, remark=remark)
                self._end(0.0)
                ended = time.monotonic() - noticed
                self._report_restart(failure)
                before = failure
                self._restart = replace(
                    self._restart, number=self._restart.number + 1, noticed_s=noticed - self._alive, ended_s=ended
                )

    def living(self) -> set[int]:
        return {pid for _, pid in list(self._running.items())}  # asked by the relay's thread, too

    def listening(self) -> set[int]:
        """All workers of the first start; workers of a restart once they have loaded the state that they would save."""
        running = list(self._running.items())
        return {pid for rank, pid in running if not self.holds or last_activity(self._folder, rank) != START}

    def _start(self) -> None:
        forget_records(self._folder)
        forget_final(self._folder)
        self._store = None  # it has the port that the user chose until then
        self._store = LocalStore(self._job.address, self._job.port)
        common = {
            **self._environment,
            **self._store.environment(),
            **self._restart.to_environment(),
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(self._count),
            "TORCHELASTIC_RUN_ID": f"gptpar-{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": str(self._restart.number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.max_restarts),
        }
        for rank in range(self._count):
            mine = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            process = self._start_worker({**common, **mine})
            self._running[rank] = process
            self._groups.append(process)

    def _start_worker(self, environment: dict[str, str]) -> int:
        if self._template is not None:
            try:
                return self._template.start(environment)
            except OSError:  # it was killed or stopped; without it a start takes longer
                self._template.end()
                self._template = None
        process = subprocess.Popen(self._job.program.command(environment), env=environment, start_new_session=True)
        process.returncode = 0  # this class waits for it, as it does for a template's forks
        return process.pid

    def _watch(self) -> Failure | None:
        """Wait for the workers' end; returns the first failure, while the others still live."""
        self._alive = looked = time.monotonic()
        signs = SignsOfLife(self._folder)
        while self._running:
            if failures := self._reap():
                if all(failure.is_exit for failure in failures):
                    time.sleep(OTHERS_SECONDS)
                    failures += self._reap()
                # A short life may have ended between two looks at what the workers were doing.
                self.holds = self.holds or self._have_begun(failures)
                return min(failures, key=lambda failure: (failure.is_exit, failure.final, failure.rank))
            now = time.monotonic()
            self._alive = now
            if now - looked > LIFE_SECONDS:
                looked = now
                self.holds = self.holds or self._have_begun()
                silent = signs.silence(self._running.values())
                if self._job.hang_seconds and silent > self._job.hang_seconds and self.relay.signal is None:
                    return self._standstill(silent)
            time.sleep(POLL_SECONDS)
        return None

    def _have_begun(self, failures: Sequence[Failure] = ()) -> bool:
        """Whether workers, or those that failed, have left their start-up, so that there is something to lose."""
        doing = [last_activity(self._folder, rank) for rank in self._running] + [failure.doing for failure in failures]
        return self._job.max_restarts > 0 and any(one != START for one in doing)

    def _standstill(self, silent: float) -> Failure:
        """The failure of workers that all hang: that of a stopped worker if there is one, else of the lowest rank."""
        ranks = sorted(self._running)
        stopped = [rank for rank in ranks if is_stopped(self._running[rank])]
        rank = (stopped or ranks)[0]
        return Failure(rank, None, last_activity(self._folder, rank), silent=silent, stopped=bool(stopped))

    def _why_not_again(self, failure: Failure, before: Failure | None) -> str | None:
        """Why no restart follows, as a remark for the last message (may be empty); ``None``: a restart follows."""
        job, used, asked = self._job, self._restart.number, self.relay.signal is not None
        if job.max_restarts == 0 or failure.final or self.relay.kills:
            return ""
        if asked and (not self.holds or failure.doing != START):
            return ""
        if failure.is_repeated(before):
            return "; it ended there before, so a restart would end there again"
        if used == job.max_restarts:
            return f"; all {used} restarts (--max-restarts) are used up"
        return None

    def _report_restart(self, failure: Failure) -> None:
        number, limit = self._restart.number + 1, self._job.max_restarts
        print_message(f"restart {number} of {limit}: {failure}")
        if (count := self._job.processes_left(self._count)) != self._count:
            print_message(
                f"  {count} of {self._count} processes go on: this machine has no more GPUs left that suit the layout"
            )
            self._count = count

    def _end(self, seconds: float) -> None:
        """End the remaining workers and the processes that they started; wait until the system has reaped them.

        Args:
            seconds: time between SIGTERM and SIGKILL; 0: SIGKILL at once.
        """
        deadline = time.monotonic() + seconds
        if seconds:
            for process in self._running.values():
                os.kill(process, signal.SIGTERM)
            while self._running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self._reap()
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        while self._running:
            time.sleep(0.005)
            self._reap()
        for group in self._groups:
            with contextlib.suppress(ChildProcessError):  # helpers of dead workers, which are our children now
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
        self._groups.clear()

    def _reap(self) -> list[Failure]:
        """Take note of workers that have ended; returns the failures among them."""
        failures = []
        for rank, process in list(self._running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            del self._running[rank]
            if code := os.waitstatus_to_exitcode(status):
                doing, final = last_activity(self._folder, rank), is_final(self._folder, rank)
                failures.append(Failure(rank, code, doing, final=final))
        return failures
