"""Refuses pickles of strangers whose reading takes memory or time out of proportion to their bytes.

A few bytes can repeat an object by its number. Tuples of tuples then have a hash that takes all of the C stack, or time
exponential in their number, and a call that copies its argument can be repeated. Python does not limit either.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

from gptpar.errors import CheckpointError, printable

MAX_ELEMENTS = 4096
"""Limit of the elements of a tuple and of the tuples in it, which one hash reads; a generator's state has 628."""

MAX_TUPLES = 100
"""Limit of tuples in each other, or beside each other in one tuple."""

MAX_COPIES = 64
"""Limit of the bytes that a pickle passes to calls, as a multiple of its own."""

_PICKLES_BEFORE_CONTENT = 3
"""A number, a version and a machine, in files of ``torch.save`` from before 2020."""


class BoundedUnpickler(pickle._Unpickler):  # the C version allocates as many objects as a few bytes ask for
    """Refuses tuples whose hash takes long.

    Raises:
        pickle.UnpicklingError: by ``load``.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def _bounded(self) -> None:
        left, elements, tuples = [self.stack[-1]], 0, 0
        while left:
            one = left.pop()
            elements, tuples = elements + len(one), tuples + 1
            if elements > MAX_ELEMENTS or tuples > MAX_TUPLES:
                raise pickle.UnpicklingError(
                    f"a tuple of it has more than {MAX_ELEMENTS:,} elements or {MAX_TUPLES} tuples in it"
                )
            left += [inner for inner in one if type(inner) is tuple]


def _then_bounded(load: Callable[..., None]) -> Callable[..., None]:
    def checked(self: BoundedUnpickler) -> None:
        load(self)
        self._bounded()

    return checked


BoundedUnpickler.dispatch |= {
    opcode[0]: _then_bounded(pickle._Unpickler.dispatch[opcode[0]])
    for opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
}


class _Anything:
    """Replaces every object of a class, and the result of every call.

    Attributes:
        room: elements that calls may still be given, in a list.
    """

    room: ClassVar[list[int]]

    def __new__(cls, *args: Any, **_: Any) -> _Anything:
        cls.room[0] -= sum(len(one) for one in args if isinstance(one, list | tuple | dict | set | bytes | bytearray))
        if cls.room[0] < 0:
            raise pickle.UnpicklingError(f"it hands more than {MAX_COPIES} times its own length to calls")
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def _take(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = update = _take


class _Trial(BoundedUnpickler):
    """Reads a pickle without building an object of any class that it names."""

    def __init__(self, file: Any, num_bytes: int):
        super().__init__(file)
        self._class = type("Anything", (_Anything,), {"room": [MAX_COPIES * num_bytes]})

    def find_class(self, module: str, name: str) -> Any:
        return self._class

    def persistent_load(self, pid: Any) -> Any:
        return self._class()


def require_bounded_archive(file: Any) -> None:
    """Make sure that reading a zip archive of ``torch.save`` takes memory and time in proportion to its bytes.

    Raises:
        CheckpointError: its records share bytes, or are compressed; the text has no path.
        pickle.UnpicklingError: its pickle repeats too much.
    """
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"record {printable(record.filename[:80])} is compressed; torch.save compresses none"
                )
        for one, following in pairwise(records):
            if one.header_offset + one.compress_size > following.header_offset:
                names = f"{printable(one.filename[:80])} and {printable(following.filename[:80])}"
                raise CheckpointError(f"records {names} share bytes, which could fill any memory")
        for record in records:
            if record.filename.endswith("data.pkl"):
                with archive.open(record) as content:
                    _Trial(content, record.file_size).load()


def require_bounded_pickles(file: Any, num_bytes: int) -> None:
    """Make sure of the same for a file from before 2020, which begins with several pickles instead of an archive.

    Raises:
        pickle.UnpicklingError: its pickles repeat too much.
    """
    for _ in range(_PICKLES_BEFORE_CONTENT + 1):
        _Trial(file, num_bytes).load()
