"""Signals and deaths in other orders: bursts, closed terminals, frozen machines, deaths with restarts."""

import os
import pty
import re
import shutil
import signal
import time
import tty
from pathlib import Path

from tests.faults.commands import Running
from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import RUN_LIMIT, Place
from tests.faults.prepared import STEPS

KINDS: list[Kind] = []

RESTARTS = ("--max-restarts", "5", "--mirror-interval", "3")
REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
MIRRORS = Path("/dev/shm")


@kind(KINDS, one=4, four=2)
def burst_of_signals(place: Place) -> Measured:
    """Several requests to stop within a second, sent to every process at once, as a batch system does: it saves."""
    running = place.with_data().train()
    if place.moment(running) == "start":
        running.until(lambda: "iteration        1/" in running.text(), 240)
    rng, first = place.random, None
    was_over = running.poll() is not None
    for _ in range(rng.randint(2, 6)):
        number = rng.choice((*REQUESTS, signal.SIGCONT))
        for pid in [running.pid, *running.others()]:
            running.send(number, pid)
        first = first or (None if number == signal.SIGCONT else number)
        time.sleep(rng.uniform(0, 0.2))
    seconds = place.ended(running, killed=True)
    is_over = was_over or f"iteration {STEPS:8d}/" in running.text()
    allowed = {128 + number for number in REQUESTS}
    if first is None or is_over:
        allowed |= {0}
    place.expect(running, allowed)
    return place.goes_on([running], saved=True, seconds=seconds)


@kind(KINDS, one=3, four=1)
def terminal_closes(place: Place) -> Measured:
    """The terminal in which the run was started is closed, or its connection lost: it saves, and ends."""
    ours, theirs = pty.openpty()
    log = place.folder / "log-terminal"

    def take_terminal() -> None:
        os.close(ours)
        os.login_tty(theirs)

    tty.setraw(theirs)
    running = place.with_data().train(inside=take_terminal, output=log, fresh=True)
    os.close(theirs)
    end = time.monotonic() + place.reference.start_seconds + place.random.uniform(0.3, place.reference.train_seconds)
    os.set_blocking(ours, False)
    while time.monotonic() < end and running.poll() is None:
        try:
            log.write_bytes(log.read_bytes() + os.read(ours, 65536))
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    seconds = place.ended(running, killed=True)
    if place.steps_told(running):
        place.expect(running, (0, 128 + signal.SIGHUP))
    return place.goes_on([running], saved=True, seconds=seconds)


@kind(KINDS, one=2, four=1)
def frozen_machine(place: Place) -> Measured:
    """All processes stand still for some seconds, as while a virtual machine is moved: the run goes on."""
    more = (*RESTARTS, "--hang-seconds", "2") if place.random.random() < 0.7 else ()
    running = place.with_data().train(*more)
    running.until(lambda: "iteration        1/" in running.text(), RUN_LIMIT[place.workers])
    running.sleep(place.random.uniform(0, place.reference.train_seconds))
    pids = [running.pid, *running.others()]
    place.random.shuffle(pids)
    for number, seconds in ((signal.SIGSTOP, place.random.uniform(1.0, 4.0)), (signal.SIGCONT, 0.0)):
        for pid in pids:
            running.send(number, pid)
        time.sleep(seconds)
    return _finishes(place, running)


@kind(KINDS, one=5, four=3)
def deaths_with_restarts(place: Place) -> Measured:
    """kill -9 of random workers, or of the process that forks them, with --max-restarts: the run finishes by itself."""
    running = place.with_data().train(*RESTARTS)
    for _ in range(place.random.randint(1, 3)):
        place.moment(running)
        if targets := running.others():
            running.send(signal.SIGKILL, place.random.choice(targets))
    return _finishes(place, running)


@kind(KINDS, one=4, four=2)
def lost_copies(place: Place) -> Measured:
    """The folder of copies in memory is removed, emptied, damaged or made unreadable, and then a worker is killed."""
    running = place.with_data().train(*RESTARTS)
    before = set(MIRRORS.glob("gptpar-mirror-*"))
    place.moment(running)
    mine = [folder for folder in before | set(MIRRORS.glob("gptpar-mirror-*")) if _is_of(folder, running)]
    files = [path for folder in mine for path in sorted(folder.rglob("*")) if path.is_file()]
    case = place.random.randrange(4)
    place.note(("removed", "emptied", "damaged", "unreadable")[case])
    for folder in mine:
        if case == 0:
            shutil.rmtree(folder, ignore_errors=True)
        elif case == 3:
            folder.chmod(0o777)
    for path in files:
        if case == 1:
            path.unlink(missing_ok=True)
        elif case == 2 and path.exists():
            path.write_bytes(place.random.randbytes(path.stat().st_size // 2))
    if targets := running.workers():
        running.send(signal.SIGKILL, place.random.choice(targets))
    place.ended(running, RUN_LIMIT[4])
    for folder in re.findall(r"--load (/dev/shm/gptpar-mirror-\w+)", running.text()):
        shutil.rmtree(folder)
    if running.status == 0:
        return _finishes(place, running)
    return place.goes_on([running])


def _is_of(folder: Path, running: Running) -> bool:
    try:
        return f'"pid": {running.pid}' in (folder / "owner.json").read_text()
    except OSError:
        return False


def _finishes(place: Place, running: Running) -> Measured:
    place.ended(running, RUN_LIMIT[4])
    place.expect(running)
    if left := [folder for folder in MIRRORS.glob("gptpar-mirror-*") if _is_of(folder, running)]:
        raise Failed("not whole", f"{left} is left in memory")
    place.equals_undisturbed()
    return Measured()
