"""Processes that are killed, asked to stop, or held up."""

import re
import signal
import time

from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import Place
from tests.faults.prepared import STEPS

KINDS: list[Kind] = []

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_BEFORE = 1.2
"""Seconds after which a second Ctrl-C counts as one: the first may reach a worker twice."""


@kind(KINDS, one=7, four=3.2)
def kill_at_a_random_moment(place: Place) -> Measured:
    """kill -9 of the command (with several workers: of one of them, or of their launcher) at a random instant."""
    running = place.with_data().train()
    place.moment(running)
    targets = [running.pid] if place.workers == 1 else [running.pid, *running.workers()]
    running.send(signal.SIGKILL, place.random.choice(targets))
    seconds = place.ended(running, killed=True)
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=9, four=2)
def kill_at_a_file_operation(place: Place) -> Measured:
    """kill -9 just before a random file operation in the run folder: in saves, clean-up, logs and the owner's file."""
    operation = place.operation()
    running = place.with_data().train(disturbed={**operation, "kill_at": operation["number"]})
    place.ended(running, 300.0, killed=True)
    return place.goes_on([running])


@kind(KINDS, one=1)
def killed_again_and_again(place: Place) -> Measured:
    """kill -9 at random operations until the run is finished, or six times."""
    place.with_data()
    runs = []
    for _ in range(6):
        number = place.random.randint(1, place.reference.operations[0])
        runs.append(place.train(disturbed={"under": str(place.run_folder), "kill_at": number}))
        place.ended(runs[-1], killed=True)
    return place.goes_on(runs[-1:])


@kind(KINDS, one=5, four=2)
def asked_to_stop(place: Place) -> Measured:
    """SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 at a random moment: it saves, and ends with 128 + the number."""
    return _asked(place, {})


@kind(KINDS, one=2, four=0.8)
def asked_in_a_slow_save(place: Place) -> Measured:
    """The same while each save takes longer than a launcher's grace, as on a shared file system."""
    return _asked(place, {"under": str(place.run_folder), "slow_s": place.random.uniform(1.5, 3.0)})


def _asked(place: Place, slow: dict[str, object]) -> Measured:
    number = place.random.choice(REQUESTS)
    running = place.with_data().train(
        disturbed=slow or None, variables={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"} if slow else None
    )
    if slow and place.random.random() < 0.7:
        until = place.random.randint(1, 3)
        running.until(lambda: running.text().count("saving checkpoint at iteration") >= until, 120)
        running.sleep(place.random.uniform(0, 0.5))
    else:
        place.moment(running)
    reached, was_over = place.steps_told(running), running.poll() is not None
    running.send(number)
    seconds = place.ended(running, killed=True)
    expected = {128 + number}
    if was_over or f"iteration {STEPS:8d}/" in running.text():
        expected |= {0}
    if not reached:
        expected |= {-number}  # before Python had its handlers
    place.note(f"after {number.name}")
    place.expect(running, expected)
    return place.goes_on([running], saved=True, seconds=seconds)


@kind(KINDS, one=1, four=0.4)
def interrupted_twice(place: Place) -> Measured:
    """A second Ctrl-C in the middle of a slow save stops at once; nothing older is lost."""
    running = place.with_data().train(disturbed={"under": str(place.run_folder), "slow_s": 3.0})
    until = place.random.randint(2, 4)
    running.until(lambda: running.text().count("saving checkpoint at iteration") >= until, 120)
    running.sleep(place.random.uniform(0, 0.3))
    running.send(signal.SIGINT)
    running.sleep(place.random.uniform(NOT_BEFORE, 2.5))
    running.send(signal.SIGINT)
    seconds = place.ended(running, killed=True)
    place.expect(running, {128 + signal.SIGINT})
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=0.6, four=0.4)
def held_up_for_a_while(place: Place) -> Measured:
    """SIGSTOP of one process and SIGCONT soon after: the run finishes as if nothing had happened."""
    running = place.with_data().train()
    place.moment(running)
    pid = place.random.choice(running.workers() or [running.pid])
    running.send(signal.SIGSTOP, pid)
    time.sleep(place.random.uniform(0.1, 3.0))
    running.send(signal.SIGCONT, pid)
    place.ended(running, 300.0)
    place.expect(running)
    return place.goes_on([running])


@kind(KINDS, four=0.4)
def hung(place: Place) -> Measured:
    """SIGSTOP of one worker for good: the others end after --distributed-timeout-minutes, and so does it."""
    running = place.with_data().train("--distributed-timeout-minutes", "0.1")
    running.until(lambda: "iteration        1/" in running.text(), 240)
    running.sleep(place.random.uniform(0, place.reference.train_seconds / 2))
    workers = running.workers()
    if len(workers) < place.workers:
        return place.goes_on([running])
    running.send(signal.SIGSTOP, place.random.choice(workers))
    seconds = place.ended(running, 240.0, killed=True)
    if running.status == 0 and place.steps_told(running) < STEPS:
        raise Failed("silent loss", "exit status 0 although a worker hung")
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=1, four=0.2)
def two_at_once(place: Place) -> Measured:
    """The same command twice, moments apart: one runs, the other is refused or follows it."""
    first = place.with_data().train()
    first.sleep(place.random.uniform(0, place.reference.start_seconds + place.reference.train_seconds))
    second = place.train()
    for running in (first, second):
        place.ended(running, 300.0)
    if 0 not in (first.status, second.status):
        raise Failed("not whole", f"both were refused: {first.text()[-300:]} {second.text()[-300:]}")
    for running in (first, second):
        if running.status != 0 and not re.search(r"is in use|was taken by another run", running.text()):
            raise Failed("not whole", f"refused for another reason: {running.text()[-300:]}")
    return place.goes_on([first, second])
