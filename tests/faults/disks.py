"""Disks that are full, refuse operations, or limit the size of a file."""

import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.faults.commands import Running
from tests.faults.fault import Kind, Measured, kind
from tests.faults.place import Place

KINDS: list[Kind] = []

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EINTR)
OUTPUTS = ("run", "tensorboard", "cache", "log")
SENTENCE = (0, 1, 2, 74, 120)
"""Exit statuses of a command that ended by itself: 74 if the newest state is not on the disk, 120 if stdout is cut."""

LARGEST_FILE = 120_000
"""More bytes than any file of the tiny run has."""


@kind(KINDS, one=6, four=1.6)
def refused_operations(place: Place) -> Measured:
    """One file operation in the run folder fails, or some in a row: full, broken, read-only, gone stale, forbidden."""
    operation = place.operation()
    fault = {"fail_at": operation["number"], "errno": place.random.choice(ERRORS)}
    fault["fail_for"] = place.random.choice((1, 1, 3, 1000))
    running = place.with_data().train_to_end(limit=300.0, disturbed={**operation, **fault})
    return place.goes_on([running])


@kind(KINDS, one=2)
def files_of_limited_size(place: Place) -> Measured:
    """No file may grow beyond a random size (EFBIG), neither the run's files nor the file with its output."""
    limit = place.random.randint(1, LARGEST_FILE)
    running = place.with_data().train(inside=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    seconds = _over_in_a_sentence(place, running)
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=3, four=0.6)
def full_disk(place: Place) -> Measured:
    """A small file system under the run folder, TensorBoard, the index cache, or what the run prints."""
    if not may_mount():
        return files_of_limited_size(place)
    output = place.random.choice(OUTPUTS)
    under = place.with_data().folder / output
    under.mkdir()
    with small_file_system(under, f"size={place.random.randint(8, 400)}k") as remount:
        more = ["--tensorboard-dir", "tensorboard"] if output == "tensorboard" else []
        options = {"output": under / "log"} if output == "log" else {}
        running = place.train(*more, **options)
        seconds = _over_in_a_sentence(place, running) if output == "log" else place.ended(running)
        if output != "run":
            place.note(f"a full disk under {output}")
            place.expect(running)
            place.equals_undisturbed()
            return Measured(seconds_to_exit=seconds)
        remount("size=16m")
        return place.goes_on([running], seconds=seconds)


def _over_in_a_sentence(place: Place, running: Running) -> float:
    """Where what it prints is cut, only the exit status can be judged."""
    seconds = place.over(running)
    place.expect(running, SENTENCE, "traceback")
    place.no_foreign_code()
    return seconds


@cache
def may_mount() -> bool:
    """Whether this process may mount file systems."""
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return probe.returncode == 0


@contextmanager
def small_file_system(folder: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A file system in memory with mount's options, at a folder; gives what mounts it anew with others."""

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    mount(options)
    try:
        yield lambda others: mount(f"remount,{others}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
