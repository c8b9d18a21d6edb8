"""Processes that are killed, asked to stop, or held up."""

import re
import signal
import time

from tests.faults.fault import Failed, Kind, Measured
from tests.faults.place import Place
from tests.faults.prepared import STEPS

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_BEFORE = 1.2
"""Seconds after which a second Ctrl-C counts as one: the first may reach a worker twice."""


def kill_at_a_random_moment(place: Place) -> Measured:
    """kill -9 of the command (with several workers: of one of them, or of their launcher) at a random instant."""
    running = place.with_data().train()
    place.moment(running)
    targets = [running.pid] if place.workers == 1 else [running.pid, *running.workers()]
    running.send(signal.SIGKILL, place.random.choice(targets))
    seconds = place.ended(running)
    place.plain(running, killed=True)
    measured = place.goes_on([running])
    measured.seconds_to_exit = seconds
    return measured


def kill_at_a_file_operation(place: Place) -> Measured:
    """kill -9 just before a random file operation in the run folder: in saves, clean-up, logs and the owner's file."""
    operation = place.operation()
    running = place.with_data().train(disturbed={**operation, "kill_at": operation["number"]})
    place.ended(running, 300.0)
    place.plain(running, killed=True)
    return place.goes_on([running])


def killed_again_and_again(place: Place) -> Measured:
    """kill -9 at random operations until the run is finished, or six times."""
    place.with_data()
    runs = []
    for _ in range(6):
        number = place.random.randint(1, place.reference.operations[0])
        runs.append(place.train(disturbed={"under": str(place.run_folder), "kill_at": number}))
        place.ended(runs[-1])
        place.plain(runs[-1], killed=True)
    return place.goes_on(runs[-1:])


def asked_to_stop(place: Place) -> Measured:
    """SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 at a random moment: it saves, and ends with 128 + the number."""
    return _asked(place, {})


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
    seconds = place.ended(running)
    place.plain(running, killed=True)
    expected = {128 + number}
    if was_over or f"iteration {STEPS:8d}/" in running.text():
        expected |= {0}
    if not reached:
        expected |= {-number}  # before Python had its handlers
    if running.status not in expected:
        raise Failed("not whole", f"exit status {running.status} after {number.name}: {running.text()[-500:]}")
    measured = place.goes_on([running], saved=True)
    measured.seconds_to_exit = seconds
    return measured


def interrupted_twice(place: Place) -> Measured:
    """A second Ctrl-C in the middle of a slow save stops at once; nothing older is lost."""
    running = place.with_data().train(disturbed={"under": str(place.run_folder), "slow_s": 3.0})
    until = place.random.randint(2, 4)
    running.until(lambda: running.text().count("saving checkpoint at iteration") >= until, 120)
    running.sleep(place.random.uniform(0, 0.3))
    running.send(signal.SIGINT)
    running.sleep(place.random.uniform(NOT_BEFORE, 2.5))
    running.send(signal.SIGINT)
    seconds = place.ended(running)
    place.plain(running, killed=True)
    if running.status != 130:
        raise Failed("not whole", f"exit status {running.status} after two Ctrl-C: {running.text()[-500:]}")
    measured = place.goes_on([running])
    measured.seconds_to_exit = seconds
    return measured


def held_up_for_a_while(place: Place) -> Measured:
    """SIGSTOP of one process and SIGCONT soon after: the run finishes as if nothing had happened."""
    running = place.with_data().train()
    place.moment(running)
    pid = place.random.choice(running.workers() or [running.pid])
    running.send(signal.SIGSTOP, pid)
    time.sleep(place.random.uniform(0.1, 3.0))
    running.send(signal.SIGCONT, pid)
    place.ended(running, 300.0)
    place.plain(running)
    if running.status != 0:
        raise Failed("not whole", f"exit status {running.status}: {running.text()[-500:]}")
    return place.goes_on([running])


def hung(place: Place) -> Measured:
    """SIGSTOP of one worker for good: the others end after --distributed-timeout-minutes, and so does it."""
    running = place.with_data().train("--distributed-timeout-minutes", "0.1")
    running.until(lambda: "iteration        1/" in running.text(), 240)
    running.sleep(place.random.uniform(0, place.reference.train_seconds / 2))
    workers = running.workers()
    if len(workers) < place.workers:
        return place.goes_on([running])
    running.send(signal.SIGSTOP, place.random.choice(workers))
    seconds = place.ended(running, 240.0)
    place.plain(running, killed=True)
    if running.status == 0 and place.steps_told(running) < STEPS:
        raise Failed("silent loss", "exit status 0 although a worker hung")
    measured = place.goes_on([running])
    measured.seconds_to_exit = seconds
    return measured


def two_at_once(place: Place) -> Measured:
    """The same command twice, moments apart: one runs, the other is refused or follows it."""
    first = place.with_data().train()
    first.sleep(place.random.uniform(0, place.reference.start_seconds + place.reference.train_seconds))
    second = place.train()
    for running in (first, second):
        place.ended(running, 300.0)
        place.plain(running)
    if 0 not in (first.status, second.status):
        raise Failed("not whole", f"both were refused: {first.text()[-300:]} {second.text()[-300:]}")
    for running in (first, second):
        if running.status != 0 and not re.search(r"is in use|was taken by another run", running.text()):
            raise Failed("not whole", f"refused for another reason: {running.text()[-300:]}")
    return place.goes_on([first, second])


ONE = [
    Kind("kill-at-a-random-moment", kill_at_a_random_moment, 1, 7),
    Kind("kill-at-a-file-operation", kill_at_a_file_operation, 1, 9),
    Kind("killed-again-and-again", killed_again_and_again, 1, 1),
    Kind("asked-to-stop", asked_to_stop, 1, 5),
    Kind("asked-in-a-slow-save", asked_in_a_slow_save, 1, 2),
    Kind("interrupted-twice", interrupted_twice, 1, 1),
    Kind("held-up-for-a-while", held_up_for_a_while, 1, 0.6),
    Kind("two-at-once", two_at_once, 1, 1),
]
FOUR = [
    Kind("kill-at-a-random-moment", kill_at_a_random_moment, 4, 3.2),
    Kind("kill-at-a-file-operation", kill_at_a_file_operation, 4, 2),
    Kind("asked-to-stop", asked_to_stop, 4, 2),
    Kind("asked-in-a-slow-save", asked_in_a_slow_save, 4, 0.8),
    Kind("interrupted-twice", interrupted_twice, 4, 0.4),
    Kind("held-up-for-a-while", held_up_for_a_while, 4, 0.4),
    Kind("hung", hung, 4, 0.4),
    Kind("two-at-once", two_at_once, 4, 0.2),
]
