"""CRC-32 of memory, copies and reads: csrc/crc32.cpp, in a fifth of zlib's time, or zlib without a compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import zlib

import torch

from gptpar.system import native
from gptpar.system.regions import copy_bytes


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The helper; ``None`` without a compiler or the processor's instructions: zlib does the same."""
    if (library := native.load_if_possible("crc32")) is None:
        return None
    library.crc32_of.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    library.crc32_of.restype = ctypes.c_uint32
    library.crc32_of_copied.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    library.crc32_of_copied.restype = ctypes.c_uint32
    i64, u64 = ctypes.c_int64, ctypes.c_uint64
    library.crc32_of_read.argtypes = [ctypes.c_int32, ctypes.c_void_p, u64, i64, u64, ctypes.POINTER(ctypes.c_uint32)]
    library.crc32_of_read.restype = i64
    return library if library.crc32_is_fast() else None


def crc32(data: torch.Tensor, before: int = 0) -> int:
    """zlib's CRC-32.

    Args:
        data: [bytes] uint8, contiguous, on the host.
        before: CRC-32 of the bytes that precede these.
    """
    library = _library()
    if library is None:
        return zlib.crc32(data.numpy().data, before)
    found: int = library.crc32_of(data.data_ptr(), data.numel(), before)  # ctypes releases Python's lock
    return found


def copy_with_crc32(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy a tensor's row-major bytes (:func:`~gptpar.system.regions.copy_bytes`); returns their CRC-32.

    On the host the bytes are read once for both.

    Args:
        target: [bytes] uint8, contiguous, on the host.
    """
    library = _library()
    if library is None or source.device.type != "cpu":
        copy_bytes(target, source)
        return crc32(target)
    source = source.contiguous()
    assert target.numel() == source.nbytes
    found: int = library.crc32_of_copied(target.data_ptr(), source.data_ptr(), source.nbytes, 0)
    return found


def read_with_crc32(file: int, place: int, target: torch.Tensor, before: int, part_bytes: int) -> tuple[int, int]:
    """Fill a tensor with the bytes at a place of a file.

    All parts are one call, which does not hold Python's lock: threads would wait for it after each part.

    Args:
        file: its descriptor.
        target: [bytes] uint8, contiguous, on the host.
        before: CRC-32 of the bytes that precede these.
        part_bytes: bytes that are read before their CRC-32 is computed.

    Returns:
        Number of bytes, fewer at the file's end; CRC-32 of the bytes before and these.

    Raises:
        OSError: the system refuses.
    """
    library = _library()
    if library is None:
        view, done = target.numpy().data, 0
        while done < len(view) and (count := os.preadv(file, [view[done : done + part_bytes]], place + done)):
            done += count
        return done, crc32(target[:done], before)
    crc = ctypes.c_uint32(before)
    found: int = library.crc32_of_read(file, target.data_ptr(), target.numel(), place, part_bytes, ctypes.byref(crc))
    if found < 0:
        raise OSError(-found, os.strerror(-found))
    return found, crc.value
