"""Reads .zst files with Python's own module (from 3.14 on) or the zstandard package, and detects truncated ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

from gptpar.errors import DataError

READ_BYTES = 1 << 10
"""Four bytes may become 128 KiB, so that a larger part could fill the memory."""


def zstd_library() -> tuple[Callable[[], Any], type[Exception]]:
    """(function that makes a decompressor of one frame, the exception that this raises).

    Raises:
        DataError: neither library is installed.
    """
    try:
        from compression import zstd
    except ImportError:
        pass
    else:
        return zstd.ZstdDecompressor, zstd.ZstdError
    try:
        import zstandard
    except ImportError as error:
        raise DataError("a .zst file needs the zstandard library: pip install 'gptpar[zst]'") from error
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


class ZstdReader(io.RawIOBase):
    """The content of all frames of a file, one after the other.

    Raises:
        OSError: the file is damaged, or ends within a frame, which some versions of the libraries' own file objects
            do not report.
    """

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._new_frame, self._error = zstd_library()
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise OSError("the file ends in the middle of a zstd frame")
                return 0
            self._decompress()
        size = min(len(buffer), len(self._output))  # a view: a few input bytes may have made megabytes
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._new_frame()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._error as error:
            raise OSError(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
