"""``manifest.json``, a checkpoint's table of contents: where every byte of every tensor lies.

JSON on purpose: nothing on the load path unpickles, so a checkpoint from a stranger cannot run code. Every
field is checked before it is used, and a SHA-256 over the contents catches damage to the manifest itself. (It is no
signature: who can rewrite the files can rewrite it too.)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.system.files import read_regular
from gptpar.system.snapshot import PIECE_BYTES
from gptpar.topology.tensor_parts import first_overlap

MANIFEST_NAME = "manifest.json"
FORMAT = "gptpar-checkpoint"
VERSION = 1
MAX_COUNT = 2**63 - 1
"""Sizes and offsets are 64-bit numbers to torch and to the system."""
MAX_DIMS = 64
"""The most dims of a tensor, as in torch."""

_DATA_FILE = re.compile(r"rank\d{5,}\.bin")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}


class DamagedCheckpoint(CheckpointError):
    """The bytes on disk are not those that were saved: a file is missing, cut short or altered."""


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor, stored row-major in consecutive bytes of one file.

    Attributes:
        offsets, sizes: the box, in elements of the global tensor.
        file: name inside the checkpoint directory.
        start: byte offset in the file.
        pieces: (bytes, CRC-32) of each consecutive piece; a piece is whole elements and at most
            `PIECE_BYTES`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        """Byte offset in the file just past this chunk."""
        return self.start + sum(length for length, _ in self.pieces)


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor, whatever layout saved it; its chunks tile it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds except the tensors' bytes; `meta` is the caller's own JSON."""

    iteration: int
    tensors: dict[str, TensorEntry]
    meta: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def file_sizes(self) -> dict[str, int]:
        """Bytes that each data file must have."""
        sizes: dict[str, int] = {}
        for entry in self.tensors.values():
            for chunk in entry.chunks:
                if chunk.pieces:
                    sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.stop)
        return sizes

    def to_json(self) -> str:
        """The manifest file's text: {"sha256": ..., "manifest": {...}}."""
        tensors = {
            name: {
                "dtype": dtype_name(entry.dtype),
                "shape": entry.shape,
                "chunks": [vars(chunk) for chunk in entry.chunks],
            }
            for name, entry in self.tensors.items()
        }
        body = {"format": FORMAT, "version": VERSION, "iteration": self.iteration, "meta": self.meta}
        body["tensors"] = tensors
        return json.dumps({"sha256": _digest(body), "manifest": body})


def file_of(rank: int) -> str:
    """The name of the data file that a process writes."""
    return f"rank{rank:05d}.bin"


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16.

    Raises:
        CheckpointError: a dtype that checkpoints do not store.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"cannot store dtype {name}; convert the tensor to one of {', '.join(_DTYPES)}")
    return name


def read_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of one checkpoint directory.

    Raises:
        DamagedCheckpoint: it is missing, altered or inconsistent, or of another version.
    """
    file = Path(path) / MANIFEST_NAME
    try:
        document = json.loads(read_regular(file))
        body = document["manifest"]
        _require(body["format"] == FORMAT, f"is of format {body['format']!r}, not {FORMAT!r}")
        _require(body["version"] == VERSION, f"is of version {body['version']!r}; this program reads {VERSION}")
        _require(document["sha256"] == _digest(body), "does not match its own SHA-256")
        tensors = {name: _parse_tensor(name, entry) for name, entry in body["tensors"].items()}
        _require_own_bytes(tensors)
        _require(isinstance(body["meta"], dict), "has no meta dictionary")
        return Manifest(_int(body["iteration"]), tensors, body["meta"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file} is missing: not a gptpar checkpoint, or not a whole one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"cannot be read ({type(error).__name__}: {error})"
        raise DamagedCheckpoint(f"{file} {reason}") from None


def _digest(body: Any) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _int(value: Any) -> int:
    _require(type(value) is int and 0 <= value <= MAX_COUNT, f"has {value!r:.40} where a count belongs")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)


def _parse_tensor(name: str, entry: dict[str, Any]) -> TensorEntry:
    _require(entry["dtype"] in _DTYPES, f"gives tensor {name!r} the unknown dtype {entry['dtype']!r}")
    dtype, shape = _DTYPES[entry["dtype"]], _ints(entry["shape"])
    too_large = len(shape) > MAX_DIMS or prod(size for size in shape if size) * dtype.itemsize > MAX_COUNT
    _require(not too_large, f"gives tensor {name!r} the shape {list(shape)}, which no machine can hold")
    chunks = tuple(_parse_chunk(name, chunk, shape, dtype.itemsize) for chunk in entry["chunks"])
    stored = sum(prod(chunk.sizes) for chunk in chunks)
    _require(stored == prod(shape), f"has {stored} of the {prod(shape)} elements of tensor {name!r}")
    twice = first_overlap(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks if prod(chunk.sizes)])
    if twice is not None:
        at, also = (list(offsets) for offsets, _ in twice)
        _require(
            False, f"has elements of tensor {name!r} twice and others not at all: its chunks at {at} and {also} overlap"
        )
    return TensorEntry(dtype, shape, chunks)


def _require_own_bytes(tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse bytes that several chunks claim: a small file could be a checkpoint of any size."""
    claims = sorted(
        (chunk.file, chunk.start, chunk.stop, name)
        for name, entry in tensors.items()
        for chunk in entry.chunks
        if chunk.pieces
    )
    for (file, _, stop, name), (next_file, start, _, other) in pairwise(claims):
        _require(
            file != next_file or stop <= start, f"gives bytes {start}..{stop} of {file} to {name!r} and to {other!r}"
        )


def _parse_chunk(name: str, chunk: dict[str, Any], shape: tuple[int, ...], itemsize: int) -> Chunk:
    offsets, sizes = _ints(chunk["offsets"]), _ints(chunk["sizes"])
    inside = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= length for offset, size, length in zip(offsets, sizes, shape, strict=True)
    )
    _require(inside, f"places a chunk outside tensor {name!r} of shape {list(shape)}")
    # A file name from a manifest is input from outside: it must not leave the checkpoint's directory.
    _require(_DATA_FILE.fullmatch(chunk["file"]) is not None, f"names the data file {chunk['file']!r}")
    pieces = tuple((_int(length), _int(crc)) for length, crc in chunk["pieces"])
    fits = all(0 < length <= PIECE_BYTES and length % itemsize == 0 for length, _ in pieces)
    stored, wanted = sum(length for length, _ in pieces), prod(sizes) * itemsize
    _require(fits and stored == wanted, f"has pieces of {stored} bytes for {wanted} bytes of tensor {name!r}")
    return Chunk(offsets, sizes, chunk["file"], _int(chunk["start"]), pieces)
