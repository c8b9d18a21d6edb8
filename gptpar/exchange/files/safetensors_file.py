"""Reads and writes safetensors files: the header's length in 8 bytes, a JSON header, the tensors' bytes.

A file may come from a stranger. Therefore every number of the header is checked before a tensor is read or memory is
taken.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.assembly import NewTensor
from gptpar.checkpoint.data_file import AlignedBuffers, DataFile, SourceFile, piece_starts
from gptpar.checkpoint.manifest import MAX_COUNT, MAX_DIMS
from gptpar.checkpoint.patches import ParameterView, Patch
from gptpar.errors import CheckpointError, printable
from gptpar.system.files import open_regular

MAX_HEADER_BYTES = 100_000_000
"""Limit of a header, that of the format's own library."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Number formats of weights. Tensors of other formats are not plain weights; quantised ones are an example."""

OTHER_SIZES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of an element in the formats of buffers, which are not read."""

NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a file's header describes it.

    Attributes:
        dtype: the number format, in the file format's word.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """One tensor of a file.

    Attributes:
        start, stop: its bytes, counted from the header's end.
    """

    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header has been read and checked.

    Attributes:
        header: the JSON text, with the blanks that fill it up.
        tensors: name -> tensor.
    """

    path: Path
    header: str
    tensors: dict[str, StoredTensor]

    @property
    def data_start(self) -> int:
        """The offset of the tensors' bytes in the file."""
        return 8 + len(self.header.encode())

    def part_starts(self, name: str) -> list[int]:
        """The first element of each part in which a tensor is best read."""
        stored = self.tensors[name]
        return piece_starts(self.data_start + stored.start, prod(stored.shape), DTYPES[stored.dtype].itemsize)

    @contextmanager
    def part(
        self, name: str, start: int, stop: int, buffers: AlignedBuffers, *, past_cache: bool
    ) -> Iterator[torch.Tensor]:
        """[stop - start] elements of a tensor, row by row; in memory of ``buffers``.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        dtype = DTYPES[self.tensors[name].dtype]
        first = start * dtype.itemsize
        place = self.data_start + self.tensors[name].start + first
        with buffers.take(place, (stop - start) * dtype.itemsize, dtype.itemsize) as memory:
            self.read(name, first, memory, past_cache=past_cache)
            yield memory.view(dtype)

    def read(self, name: str, first: int, memory: torch.Tensor, *, past_cache: bool = False) -> None:
        """Fill ``memory`` [bytes], uint8, with a tensor's bytes from number ``first`` on.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        try:
            with closing(SourceFile(self.path, past_cache=past_cache)) as file:
                count = file.read(self.data_start + self.tensors[name].start + first, memory)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if count < len(memory):
            raise CheckpointError(f"{self.path} ends inside tensor {printable(name)!r}: it was cut short")


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read a file's header.

    Raises:
        CheckpointError: it is no safetensors file, or its header claims something impossible.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            if begin == b"version ":
                raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: fetch it with git lfs pull")
            length = int.from_bytes(begin, "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file: {size:,} bytes, whose header claims {length:,}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = text.decode()
        tensors = tensors_of_header(header)
        _require_tiling(tensors, size - 8 - length)
    except ValueError as error:
        raise CheckpointError(f"{path} is a damaged or a hostile safetensors file: {error}") from None
    return SafetensorsFile(path, header, tensors)


def tensors_of_header(header: str) -> dict[str, StoredTensor]:
    """The entries of a header, which describe a file's bytes without gaps.

    Raises:
        ValueError: it is none.
    """
    try:
        fields = json.loads(header, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("its header is no object")
    tensors = dict(_tensors(fields))
    _require_tiling(tensors, _num_bytes(tensors))
    return tensors


def _num_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes of the tensors that a header describes, with gaps."""
    return max((stored.stop for stored in tensors.values()), default=0)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different.

    Raises:
        ValueError: a name stands twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return fields


def _tensors(fields: dict[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """The entries of a header.

    Raises:
        ValueError: one of them is not of the format.
    """
    for name, entry in fields.items():
        if name == "__metadata__":
            continue
        label = f"tensor {printable(name[:80])!r}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{label} is not described by dtype, shape and data_offsets")
        shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        if not _are_counts(shape) or len(shape) > MAX_DIMS or not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"shape or data_offsets of {label} are not whole numbers")
        width = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_SIZES.get(str(dtype))
        if width is None:
            raise ValueError(f"{label} is in an unknown format, {printable(str(dtype)[:20])!r}")
        if offsets[1] - offsets[0] != prod(shape) * width:
            raise ValueError(f"{label} of shape {shape} and {dtype} claims bytes {offsets[0]:,} to {offsets[1]:,}")
        yield name, StoredTensor(dtype, tuple(shape), *offsets)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_COUNT for value in values)


def _require_tiling(tensors: Mapping[str, StoredTensor], num_bytes: int) -> None:
    """Tensors must cover a file's bytes, each byte once.

    Raises:
        ValueError: they leave a gap, overlap, or reach past the file's end.
    """
    claims = sorted((stored.start, stored.stop) for stored in tensors.values())
    places = [(0, 0), *claims, (num_bytes, num_bytes)]
    for (_, stop), (start, _) in pairwise(places):
        if stop != start:
            raise ValueError(
                f"its tensors leave a gap, overlap or reach past the end: one ends at byte {stop:,}, the next begins "
                f"at {start:,}, and there are {num_bytes:,}"
            )


def header_of(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    """The header of a new file, byte for byte as the format's own library writes it for transformers.

    Its order: wider elements first, then by name.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, NAME_OF[tensors[name][0]], name))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        dtype, shape = tensors[name]
        stop = start + prod(shape) * dtype.itemsize
        fields[name] = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % 8)


class SafetensorsWriter:
    """A new file with a given header, whose tensors are put together by an :class:`~.assembly.Assembly`.

    Args:
        path: where no file is yet.
        header: what :func:`header_of` gives, or what a file had.

    Raises:
        CheckpointError: by all methods, where the system refuses.
        ValueError: by the constructor: the header is none.
    """

    def __init__(self, path: Path, header: str):
        self.tensors = tensors_of_header(header)
        start = header.encode()
        self._data_start = 8 + len(start)
        self._file = DataFile(path)
        self._file.reserve(0, self._data_start + _num_bytes(self.tensors))
        self._file.write(0, memoryview(len(start).to_bytes(8, "little") + start))

    def place(self, name: str) -> int:
        """The offset of a tensor's bytes in the file."""
        return self._data_start + self.tensors[name].start

    def new_tensor(self, name: str, view: ParameterView) -> NewTensor:
        """A tensor of the file, made of a view of a parameter and converted to the format that the header names.

        Raises:
            CheckpointError: the view has another number of elements.
        """
        stored = self.tensors[name]
        if prod(view.shape) != prod(stored.shape):
            raise CheckpointError(f"tensor {name!r} of shape {list(stored.shape)} got {list(view.shape)}")

        def patches(start: int, values: torch.Tensor) -> dict[str, list[Patch]]:
            return {name: view.of_elements(start, values)}

        return NewTensor(self._file, self.place(name), DTYPES[stored.dtype], prod(view.shape), patches)

    def sync(self) -> None:
        """Return when the file is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Let go of the file, whole or not."""
        self._file.close()
