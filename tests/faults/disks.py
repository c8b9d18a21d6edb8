"""Disks that are full, refuse operations, or limit the size of a file."""

import errno
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.faults.fault import Failed, Kind, Measured
from tests.faults.place import Place

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EINTR)
OUTPUTS = ("run", "tensorboard", "cache", "log")
LARGEST_FILE = 120_000
"""More bytes than any file of the tiny run has."""


def refused_operations(place: Place) -> Measured:
    """One file operation in the run folder fails, or some in a row: full, broken, read-only, gone stale, forbidden."""
    operation = place.operation()
    fault = {"fail_at": operation["number"], "errno": place.random.choice(ERRORS)}
    fault["fail_for"] = place.random.choice((1, 1, 3, 1000))
    running = place.with_data().train_to_end(limit=300.0, disturbed={**operation, **fault})
    return place.goes_on([running])


def files_of_limited_size(place: Place) -> Measured:
    """No file may grow beyond a random size (EFBIG), neither the run's files nor the file with its output."""
    limit = place.random.randint(1, LARGEST_FILE)
    running = place.with_data().train(inside=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    seconds = place.ended(running)
    _ended_in_a_sentence(place, running.status)
    measured = place.goes_on([running])
    measured.seconds_to_exit = seconds
    return measured


def full_disk(place: Place) -> Measured:
    """A small file system under the run folder, TensorBoard, the index cache, or what the run prints."""
    if not may_mount():
        return files_of_limited_size(place)
    output = place.random.choice(OUTPUTS)
    under = place.with_data().folder / output
    under.mkdir()
    with small_file_system(under, place.random.randint(8, 400)):
        more = ["--tensorboard-dir", "tensorboard"] if output == "tensorboard" else []
        options = {"output": under / "log"} if output == "log" else {}
        running = place.train(*more, **options)
        seconds = place.ended(running)
        if output == "log":
            _ended_in_a_sentence(place, running.status)
        else:
            place.plain(running)
        if output != "run" and running.status != 0:
            raise Failed("not whole", f"a full disk under {output} ended the run: {running.text()[-500:]}")
        if output != "run":
            place.equals_undisturbed()
            return Measured(seconds_to_exit=seconds)
        subprocess.run(["mount", "-o", "remount,size=16m", str(under)], check=True)
        measured = place.goes_on([running])
        measured.seconds_to_exit = seconds
        return measured


def _ended_in_a_sentence(place: Place, status: int | None) -> None:
    """Where what it prints is cut, only the exit status can be judged."""
    if status not in (
        0,
        1,
        2,
        74,
        120,
    ):  # 74: the newest state is not on the disk; 120: Python could not write the rest of stdout
        raise Failed("traceback", f"exit status {status}")
    if place.marker.exists():
        raise Failed("code executed", str(place.marker))


@cache
def may_mount() -> bool:
    """Whether this process may mount file systems."""
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return probe.returncode == 0


@contextmanager
def small_file_system(folder: Path, kibibytes: int) -> Iterator[None]:
    """A file system of ``kibibytes`` KiB, mounted at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


ONE = [
    Kind("refused-operations", refused_operations, 1, 6),
    Kind("files-of-limited-size", files_of_limited_size, 1, 2),
    Kind("full-disk", full_disk, 1, 3),
]
FOUR = [Kind("refused-operations", refused_operations, 4, 1.6), Kind("full-disk", full_disk, 4, 0.6)]
