"""Reads tensors and plain values from strangers' pickles: only allowed types, and none of their code runs.

Files of ``torch.save`` go through torch's restricted unpickler, which builds only allowed objects. gptpar allows two
classes beside those that torch allows: ``argparse.Namespace``, in which Megatron-LM keeps its arguments, and
:class:`Record`, whose fields are read. :class:`LeftOut`, an empty object, replaces objects that no weight needs (enums
among the arguments, random states). A file that names anything else is refused before it is read. Bare pickles are
read by the same rules.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import MAGIC_NUMBER, get_unsafe_globals_in_checkpoint, safe_globals

from gptpar.errors import CheckpointError, first_line, printable
from gptpar.exchange.files.bounded_pickle import BoundedUnpickler, require_bounded_archive, require_bounded_pickles
from gptpar.system.files import open_regular, read_regular

LEFT_UNREAD = (
    *("megatron.", "deepspeed.", "transformer_engine.", "apex.", "nemo.", "numpy."),
    *("_codecs.encode", "pathlib.", "signal.Signals"),
    "torch.distributed.checkpoint.",  # the plans of a save, which Megatron leaves in ``.metadata``
)
"""Prefixes of names. :class:`LeftOut` replaces objects of these names, which are neither imported nor called."""

MAX_NAMED = 4


class LeftOut:
    """Replaces an object of another program's class, and holds nothing."""

    def __init__(self, *_: object, **__: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Record:
    """Replaces an object whose fields are read.

    Attributes:
        state: the object's state if that is no dictionary. A dictionary's items become attributes instead.
    """

    state: object = None

    def __init__(self, *_: object):
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


REAL: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "_io.BytesIO": io.BytesIO,
    "deepspeed.utils.tensor_fragment.fragment_address": Record,
}
"""Name in a pickle -> the class built for it, for names that torch does not allow by itself."""


def load_torch_file(path: Path) -> Any:
    """The contents of a file that ``torch.save`` wrote; tensors stay on the disk until they are read.

    A file in torch's format of before 2020 is read whole. GPT-2's own weights have this format.

    Raises:
        CheckpointError: the file would run code, or is damaged.
    """
    with _explained(path):
        if _is_of_old_format(path):
            with open_regular(path) as file:
                require_bounded_pickles(file, path.stat().st_size)
            with safe_globals([argparse.Namespace]):
                return torch.load(path, map_location="cpu", weights_only=True)
        _require_bounded(path, path)
        with safe_globals(_allowed(path, path)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def load_torch_part(path: Path, start: int, length: int) -> Any:
    """The contents of a range of bytes that ``torch.save`` wrote into a file, read into memory.

    Raises:
        CheckpointError: the bytes would run code, or are damaged.
    """
    with _explained(path), open_regular(path) as file:
        part: Any = FilePart(file, start, length)
        _require_bounded(path, part)
        part.seek(0)
        with safe_globals(_allowed(path, part)):
            part.seek(0)
            return torch.load(part, map_location="cpu", weights_only=True)


def _require_bounded(path: Path, file: Any) -> None:
    """Make sure that reading an archive takes memory and time in proportion to its bytes.

    Raises:
        CheckpointError: it takes more.
        pickle.UnpicklingError: it takes more.
    """
    try:
        require_bounded_archive(file)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None


_BROKEN = (
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    MemoryError,
)
"""Errors that torch and pickle raise for a damaged file."""


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether memory holds every element. A few bytes may describe a huge tensor that repeats one element."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def load_pickle(path: Path, allowed: Mapping[str, Any]) -> Any:
    """The contents of a bare pickle.

    Args:
        allowed: name -> the object built for it. :class:`LeftOut` replaces names of :data:`LEFT_UNREAD`.

    Raises:
        CheckpointError: the pickle names anything else, or is damaged.
    """
    with _explained(path):
        return _Unpickler(path, allowed).load()


class _Unpickler(BoundedUnpickler):
    def __init__(self, path: Path, allowed: Mapping[str, Any]):
        super().__init__(io.BytesIO(read_regular(path)))
        self._path, self._allowed = path, allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._allowed:
            return self._allowed[full]
        if full.startswith(LEFT_UNREAD):
            return LeftOut
        raise CheckpointError(_refusal(self._path, [full]))


class FilePart(io.RawIOBase):
    """A range of a file's bytes, as a file object that can be read."""

    def __init__(self, file: IO[bytes] | io.RawIOBase, start: int, length: int):
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count = self._file.readinto(view) or 0  # type: ignore[union-attr]
        self._place += count
        return count


def _is_of_old_format(path: Path) -> bool:
    """Whether a file begins like the files that ``torch.save`` wrote before it wrote zip archives."""
    begin = pickle.dumps(MAGIC_NUMBER, 2)
    with open_regular(path) as file:
        return file.read(len(begin)) == begin


def _allowed(path: Path, file: Any) -> list[Any]:
    """The object built for each name in a file that torch does not allow by itself.

    Raises:
        CheckpointError: the file has a name that may run anything.
    """
    wanted = get_unsafe_globals_in_checkpoint(file)
    if forbidden := [name for name in wanted if name not in REAL and not name.startswith(LEFT_UNREAD)]:
        raise CheckpointError(_refusal(path, forbidden))
    return [(REAL.get(name, LeftOut), name) for name in wanted]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors in reading a file into a sentence that names the file.

    Raises:
        CheckpointError: the file could not be read, or was refused.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL and error.filename is None:  # torch raises it for an archive that ends too early
            raise CheckpointError(f"{path} is no file of torch.save, or damaged: it may have been cut short") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # the rest of torch's text says how to run it all the same
        raise CheckpointError(
            _refusal(path, [named[1]]) if named else f"{path} is refused: {_first_line(error)}"
        ) from None
    except _BROKEN as error:
        raise CheckpointError(f"{path} is no file of torch.save, or damaged: {_first_line(error)}") from None


def _refusal(path: Path, names: Iterable[str]) -> str:
    listed = sorted(names)
    calls = ", ".join(printable(name[:80]) for name in listed[:MAX_NAMED]) + ", ..." * (len(listed) > MAX_NAMED)
    return f"{path} is refused: reading it would call {calls}, which may run anything; weights need nothing of the kind"


def _first_line(error: Exception) -> str:
    return printable(first_line(error)[:200])
