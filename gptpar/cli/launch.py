"""Start one worker for each visible GPU, unless somebody (torchrun, SLURM) has done so already, and end them in order.

torchrun kills its workers 30 seconds after a signal, in the middle of a save (before torch 2.13 this cannot be
changed). So here it does not see the signals: they are passed on to the workers, which save and end by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from gptpar.errors import GptparError
from gptpar.system.activity import FOLDER_VARIABLE, START, all_activities, last_activity
from gptpar.system.processes import children, is_running
from gptpar.system.stop import AT_ONCE_SECONDS, SAME_REQUEST_SECONDS, Stopped, handling

LAUNCHER_VARIABLE = "GPTPAR_LAUNCHER"
"""Process id of the launcher, for its workers."""

PATIENCE_VARIABLE = "GPTPAR_STOP_SECONDS"
PATIENCE_SECONDS = 1800.0
"""How long workers that were asked to stop may show no sign of life: a note of what they do, a byte read or written.

A worker that waits for another ends by itself after --distributed-timeout-minutes."""

START_SECONDS = 30.0
"""The same for workers in start-up, which have nothing to save."""

GRACE_SECONDS = 5.0
"""Beyond the time after which a worker ends itself."""

POLL_SECONDS = 0.5
NOTHING_LOST = " before there was anything to save"
PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent dies


def is_worker() -> bool:
    """Whether this process was started by torchrun or by :func:`start_workers`."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def workers_wanted(nproc_per_node: int | None) -> int:
    """Processes this machine is to run: as asked for, else one for each visible GPU, else one."""
    if nproc_per_node:
        return nproc_per_node
    import torch  # a second, which a verb that needs no GPU should not pay for

    return max(1, torch.cuda.device_count())


def end_with_launcher() -> None:
    """In a worker: a launcher that dies without a word (kill -9) is a request to stop; nobody else would make one.

    Between the two there may be a wrapper, a profiler or a script of the user. Linux tells of a parent's death alone.
    """
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, 0))
    if not launcher or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        is_gone = os.getppid() != launcher  # it died before it could be watched
    else:
        is_gone = not is_running(launcher)
    if is_gone:
        os.kill(os.getpid(), signal.SIGTERM)


def start_workers(count: int, argv: Sequence[str]) -> int:
    """Run ``python -m gptpar ARGV`` in ``count`` processes; returns an exit code.

    Args:
        argv: the verb and its flags.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return main(["--standalone", f"--nproc-per-node={count}", "-m", "gptpar", *argv])


def main(argv: Sequence[str]) -> int:
    """``gptpar launch``: torchrun, whose workers get the time they need to save; takes torchrun's flags.

    Raises:
        GptparError: the machines did not find each other.
    """
    patience = _patience()
    with tempfile.TemporaryDirectory(prefix="gptpar-activity-") as folder, _told_to_workers(folder):
        relay = _Relay(Path(folder), patience)
        try:
            with relay.listening():
                failure = _torchrun(argv, folder)
        except Stopped as stopped:  # no worker was there to take the request
            _tell(f"{stopped}{'' if all_activities(Path(folder)) else NOTHING_LOST}")
            return 128 + stopped.signal
        return relay.exit_code(failure)


@contextlib.contextmanager
def _told_to_workers(folder: str) -> Iterator[None]:
    """They inherit the environment."""
    os.environ[FOLDER_VARIABLE], os.environ[LAUNCHER_VARIABLE] = folder, str(os.getpid())
    try:
        yield
    finally:
        del os.environ[FOLDER_VARIABLE], os.environ[LAUNCHER_VARIABLE]


def _patience() -> float:
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise GptparError(f"{PATIENCE_VARIABLE}={text} is not a number of seconds: correct it, or unset it.") from None


def _torchrun(argv: Sequence[str], folder: str) -> tuple[int, int] | None:
    """Run torchrun in this process; returns (rank, exit code) of the worker that failed first, if one did."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    # What went wrong is said by the worker itself and by the launcher; torchrun's own report would bury both.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    words = get_args_parser().parse_args(list(argv))
    words.signals_to_handle = "SIGQUIT"  # the others are ours; torchrun wants at least one
    words.log_dir = words.log_dir or os.path.join(folder, "torchrun")
    try:
        run(words)
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        return rank, failed.exitcode
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    except (DistError, RendezvousError) as error:
        where = words.rdzv_endpoint or f"{words.master_addr}:{words.master_port}"
        raise GptparError(
            f"the machines did not meet at {where} ({str(error).splitlines()[0]}): see that the first machine runs "
            "and can be reached there, and that no other program has this port (else choose another MASTER_PORT)."
        ) from error
    return None


class _Relay:
    """Passes requests to stop on to the workers, and kills them only when they no longer live.

    Args:
        folder: of the workers' records of activity.
        patience: seconds without a sign of life.
    """

    def __init__(self, folder: Path, patience: float):
        self._folder, self._patience = folder, patience
        self._signal: signal.Signals | None = None
        self._when = 0.0
        self._at_once: float | None = None
        self._killed = ""
        self._told: set[int] = set()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        try:
            with handling(self._pass_on):
                yield
        finally:
            self._ended.set()

    def exit_code(self, failure: tuple[int, int] | None) -> int:
        """What the launcher returns; says how the run ended where no worker has said so.

        Args:
            failure: rank and exit code of the worker that failed first.
        """
        asked = self._signal
        if failure is None:
            return 0 if asked is None else 128 + asked
        rank, code = failure
        doing = last_activity(self._folder, rank)
        if asked is None:
            _tell(f"error: rank {rank} {_ending(code, doing)}")
            return max(1, code)
        if self._killed:
            _tell(
                f"error: stopped by {asked.name}, and the workers were killed, with what they learnt since the last "
                f"checkpoint: {self._killed}"
            )
        elif self._at_once is not None:
            _tell("error: interrupted twice: stopped at once, without saving")
        elif code in (-asked, 128 + asked) and doing == START:
            _tell(f"stopped by {asked.name}{NOTHING_LOST}")
        else:
            _tell(f"error: stopped by {asked.name}, but rank {rank} {_ending(code, doing)}")
            return max(1, code)
        return 128 + (asked if self._at_once is None else signal.SIGINT)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._when = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._when > SAME_REQUEST_SECONDS:
            self._at_once = self._at_once or time.monotonic()
        workers = _children()
        if not workers:
            raise Stopped(number)
        _send(workers, number)
        self._told |= workers
        if not self._watcher.is_alive() and not self._ended.is_set():
            self._watcher.start()

    def _watch(self) -> None:
        """From the first request on, in a thread: torchrun's loop has the main one."""
        assert self._signal is not None
        life, since = None, time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            workers, now = _children(), time.monotonic()
            _send(workers - self._told, self._signal)  # started while the request came
            self._told |= workers
            places = set(all_activities(self._folder).values())
            if (found := (places, _bytes_moved(workers))) != life:
                life, since = found, now
            patience = min(START_SECONDS, self._patience) if places <= {START} else self._patience
            if self._at_once is not None and now - self._at_once > AT_ONCE_SECONDS + GRACE_SECONDS:
                self._kill(workers, "a second Ctrl-C did not end them")
            elif now - since > patience:
                self._kill(workers, f"no sign of life for {patience:g} s at {'; '.join(sorted(places)) or START}")

    def _kill(self, workers: set[int], reason: str) -> None:
        self._killed = self._killed or reason
        _send(workers, signal.SIGKILL)


def _send(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _children() -> set[int]:
    """The live children of this process: the workers, from their first moment."""
    return children(os.getpid())


def _bytes_moved(processes: set[int]) -> dict[int, str]:
    """What Linux counts of each process's reading and writing: a save that goes on changes it."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):
            found[process] = Path(f"/proc/{process}/io").read_text()
    return found


def _tell(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)


def _ending(exit_code: int, doing: str) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            f"was killed by SIGKILL, as Linux does to the largest process when memory is full, while it was at {doing}"
        )
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name} while it was at {doing}"
    return f"ended with exit code {exit_code} while it was at {doing}; its message is above"
