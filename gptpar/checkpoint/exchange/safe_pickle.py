"""Reading ``torch.save`` files of strangers: tensors and plain values, and nothing of theirs is run.

torch's restricted unpickler builds only what is allowed. Beside what torch allows that is ``argparse.Namespace``, in
which Megatron-LM keeps its arguments. In the place of objects that no weight needs (enums among the arguments, random
states) is put :class:`LeftOut`, an empty object. A file that names anything else is refused before it is read.
"""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from gptpar.errors import CheckpointError, printable

LEFT_UNREAD = (
    *("megatron.", "deepspeed.", "transformer_engine.", "apex.", "nemo.", "numpy."),
    *("_codecs.encode", "pathlib.", "signal.Signals"),
)
"""Beginnings of the names of objects that :class:`LeftOut` replaces; they are neither imported nor called."""

REAL: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "_io.BytesIO": io.BytesIO,
}
MAX_NAMED = 4


class LeftOut:
    """Takes the place of an object of another program's class."""

    def __init__(self, *_: object, **__: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_torch_file(path: Path) -> Any:
    """The contents of a file that ``torch.save`` wrote; tensors stay on the disk until they are read.

    Raises:
        CheckpointError: it would run code, or is damaged.
    """
    try:
        wanted = get_unsafe_globals_in_checkpoint(path)
        if forbidden := [name for name in wanted if name not in REAL and not name.startswith(LEFT_UNREAD)]:
            raise CheckpointError(_refusal(path, forbidden))
        allowed: list[Any] = [(REAL.get(name, LeftOut), name) for name in wanted]
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no file of torch.save, or damaged: {_first_line(error)}") from None
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is refused: {_first_line(error)}") from None


def _refusal(path: Path, names: Iterable[str]) -> str:
    listed = sorted(names)
    told = ", ".join(printable(name[:80]) for name in listed[:MAX_NAMED]) + ", ..." * (len(listed) > MAX_NAMED)
    return f"{path} is refused: reading it would call {told}, which may run anything; weights need nothing of the kind"


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0][:200])
