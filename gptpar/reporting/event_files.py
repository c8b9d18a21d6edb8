"""Truncates TensorBoard's event files when a run goes back to an earlier iteration, or sets them aside.

TensorBoard shows every event of every file in a folder. Its own remedy (``purge_step``) drops all events from a step
on, whatever their axis; curves over samples would end at a number of iterations. So the files themselves are truncated.
A file holds its events in the order of writing, so dropping the later ones shortens it.

A file is a sequence of records: length (8 bytes), CRC of the length (4), an ``Event`` message, CRC of the message (4).
An ``Event`` begins with its time (tag 0x09, 8 bytes) and its step (tag 0x10, a varint; absent if 0).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from gptpar.reporting.scalars import SAMPLES_SUFFIX
from gptpar.system.files import atomic_output, open_regular

_LENGTH = struct.Struct("<Q")
_HEADER, _FOOTER = 12, 4
"""Bytes before and behind an event: its length with a checksum, and the event's checksum."""
_OVER_SAMPLES = SAMPLES_SUFFIX.encode()
_NO_VALUES = b"\x2a\x00"
"""A summary of length 0, the last field of an event."""


def event_files(folder: Path) -> list[Path]:
    """The event files that TensorBoard shows as this folder's run."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def cut_after(folder: Path, iteration: int, samples: int) -> None:
    """Drop the events after ``iteration``, each file atomically; a file that holds no others is deleted.

    Args:
        samples: number of samples consumed by then, where the curves over samples end.
    """
    for path in event_files(folder):
        end = _end(path, iteration, samples)
        if end == 0:
            path.unlink()
        elif end is not None:
            temporary = path.with_name(f".cut-{os.getpid()}.tmp")  # not a name that TensorBoard reads
            with open_regular(path) as old, atomic_output(path, temporary) as new:
                while (left := end - new.tell()) > 0:
                    new.write(old.read(min(left, 1 << 20)))


def set_aside(folder: Path) -> None:
    """Move a run's event files into ``earlier-1``, or the same with the first free number: the run begins anew."""
    files = event_files(folder)
    if files:
        aside = next(one for number in count(1) if not (one := folder / f"earlier-{number}").exists())
        aside.mkdir()
        for path in files:
            path.rename(aside / path.name)


def _end(path: Path, iteration: int, samples: int) -> int | None:
    """Offset of the first event to drop; 0 if no event of a step precedes it, None if all events stay."""
    if path.stat().st_size == 0:
        return None
    num_kept = 0
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, event in _records(data):
            step = 0 if _is_empty(event) else _step(event)
            if step > (samples if _OVER_SAMPLES in event else iteration):
                return start if num_kept else 0
            num_kept += step > 0
    return None


def _records(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """(offset, message) of every complete record; a crash may have truncated the last one."""
    start = 0
    while start + _HEADER <= len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        stop = start + _HEADER + length + _FOOTER
        if stop > len(data):
            return
        yield start, data[start + _HEADER : stop - _FOOTER]
        start = stop


def _is_empty(event: bytes) -> bool:
    """Whether an event has no value. Earlier versions wrote one, over samples, with each task's scores."""
    return len(event) <= 9 + 1 + 10 + len(_NO_VALUES) and event.endswith(_NO_VALUES)


def _step(event: bytes) -> int:
    """The step of an event; 0 if it has none."""
    if event[:1] != b"\x09" or event[9:10] != b"\x10":
        return 0
    step = 0
    for place, byte in enumerate(event[10:20]):
        step |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    return step
