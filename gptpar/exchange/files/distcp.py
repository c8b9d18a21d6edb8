"""Reads folders of torch.distributed.checkpoint (``.metadata`` and files ``*.distcp``).

``.metadata`` is a pickle. A ``.distcp`` file holds boxes one after the other, each in the format of ``torch.save``.
torch's own reader unpickles whatever ``.metadata`` names. This reader allows only the names of torch's descriptions of
tensors, and reads the fields of these.
Format: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from reprlib import repr as brief  # shortens nested objects
from typing import Any

import torch

from gptpar.checkpoint.manifest import MAX_COUNT, MAX_DIMS
from gptpar.errors import CheckpointError, printable
from gptpar.exchange.files.safe_pickle import LeftOut, Record, load_pickle, load_torch_part
from gptpar.topology.tensor_parts import Box, box_view, first_overlap, overlap

METADATA = ".metadata"
_DATA_FILE = re.compile(r"[\w.-]+\.distcp")
_OF_TORCH = "torch.distributed.checkpoint."
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _size(values: Any) -> tuple[int, ...]:
    """The sizes that ``torch.Size`` makes of numbers; anything else is refused, so that no call copies a long list.

    Raises:
        ValueError: these are no sizes.
    """
    if not isinstance(values, list | tuple) or len(values) > MAX_DIMS:
        raise ValueError("a torch.Size is made of something else than a few numbers")
    return _counts(tuple(values))


def _empty() -> dict[Any, Any]:
    """An empty ``OrderedDict``; its items follow in the pickle."""
    return {}


ALLOWED: dict[str, Any] = {
    **{
        f"{_OF_TORCH}metadata.{name}": Record
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    **{f"{_OF_TORCH}filesystem.{name}": Record for name in ("_StorageInfo", "_StoragePrefix")},
    **{f"torch.{str(dtype).removeprefix('torch.')}": dtype for dtype in _DTYPES},
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": Record,
    "torch.Size": _size,
    "torch.serialization._get_layout": LeftOut,
    "collections.OrderedDict": _empty,
}


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor, and its place in a file."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor that is stored as boxes, which tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class DistcpFolder:
    """A folder whose ``.metadata`` has been read and checked.

    Args:
        path: the folder's path.

    Attributes:
        tensors: the tensors by name; other objects are left unread.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        self._last: tuple[StoredBox, torch.Tensor] | None = None
        try:
            self.tensors = dict(_tensors(load_pickle(path / METADATA, ALLOWED)))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise CheckpointError(f"{path / METADATA} is damaged: {printable(str(error)[:200])}") from None
        if problems := [*self._missing(), *self._shared()]:
            raise CheckpointError("\n".join(problems))

    def _missing(self) -> Iterator[str]:
        """A sentence for each file that is missing or ends before its last box does."""
        stops: dict[str, int] = {}
        for one in (one for tensor in self.tensors.values() for one in tensor.boxes):
            stops[one.file] = max(stops.get(one.file, 0), one.start + one.length)
        for name, stop in sorted(stops.items()):
            try:
                size = (self._path / name).stat().st_size
            except OSError as error:
                yield f"{self._path / name} cannot be read: {error.strerror}"
                continue
            if size < stop:
                needed = f"{METADATA} places tensors up to {stop:,}"
                yield f"{self._path / name} has {size:,} bytes, and {needed}: it was cut short"

    def _shared(self) -> Iterator[str]:
        """A sentence if boxes share bytes: each would read them again, as often as ``.metadata`` likes."""
        claims = sorted(
            (one.file, one.start, one.start + one.length, name)
            for name, tensor in self.tensors.items()
            for one in tensor.boxes
        )
        for (file, _, stop, name), (next_file, start, _, other) in pairwise(claims):
            if file == next_file and start < stop:
                yield (
                    f"{self._path / METADATA} is damaged: it gives byte {start:,} of {file} to tensor "
                    f"{printable(name[:80])!r} and to {printable(other[:80])!r}"
                )
                return

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A tensor in host memory, put together from its boxes; with ``index``, only that index of its first dim.

        The box that was read last stays in memory, because several layers may be stored as one tensor.

        Raises:
            CheckpointError: a file would run code, is damaged, or has another tensor than ``.metadata`` says.
        """
        tensor = self.tensors[name]
        origin, shape = (0,) * len(tensor.shape), tensor.shape
        if index is not None:
            origin, shape = (index, *origin[1:]), (1, *shape[1:])
        whole = torch.empty(shape, dtype=tensor.dtype)
        for one in tensor.boxes:
            if (common := overlap(one.box, (origin, shape))) is not None:
                values = self._box(name, one, tensor.dtype)
                box_view(whole, common, origin).copy_(box_view(values, common, one.box[0]))
        return whole if index is None else whole[0]

    def _box(self, name: str, one: StoredBox, dtype: torch.dtype) -> torch.Tensor:
        if self._last is None or self._last[0] != one:
            self._last = None  # its memory goes before the next box comes
            values = load_torch_part(self._path / one.file, one.start, one.length)
            sizes = one.box[1]
            if not isinstance(values, torch.Tensor) or values.dtype != dtype or values.numel() != prod(sizes):
                raise CheckpointError(
                    f"{self._path / one.file}: bytes {one.start:,} to {one.start + one.length:,} do not hold the part "
                    f"{list(sizes)} of tensor {printable(name[:80])!r}"
                )
            self._last = one, values.reshape(sizes)
        return self._last[1]


def _tensors(metadata: Any) -> Iterator[tuple[str, BoxedTensor]]:
    """The tensors that ``.metadata`` describes.

    Raises:
        ValueError: a description is impossible.
        AttributeError, TypeError, LookupError: a description has another form.
    """
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, place in metadata.storage_data.items():
        if index.__dict__.get("offset") is not None:
            places[_text(index.fqn), _counts(index.offset)] = place
    for name, entry in metadata.state_dict_metadata.items():
        if "chunks" in entry.__dict__:  # without chunks the entry is an object
            yield _text(name), _tensor(name, entry, places)


def _tensor(name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> BoxedTensor:
    label, shape, dtype = f"tensor {printable(name[:80])!r}", _counts(entry.size), entry.properties.state[0]
    if dtype not in _DTYPES or len(shape) > MAX_DIMS or prod(shape) * dtype.itemsize > MAX_COUNT:
        raise ValueError(f"{label} is {printable(brief(dtype)[:40])} {list(shape)}, which no machine can hold")
    boxes = tuple(
        _box(label, name, shape, dtype, chunk, places) for chunk in entry.chunks if prod(_counts(chunk.sizes))
    )
    held = sum(prod(one.box[1]) for one in boxes)
    if held != prod(shape) or first_overlap(shape, [one.box for one in boxes]):
        raise ValueError(f"the parts of {label} of shape {list(shape)} have {held:,} elements, or overlap")
    return BoxedTensor(dtype, shape, boxes)


def _box(
    label: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    chunk: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> StoredBox:
    offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
    inside = len(offsets) == len(sizes) == len(shape)
    if not inside or any(low + size > whole for low, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"{label} of shape {list(shape)} has a part {list(sizes)} at {list(offsets)}")
    if (place := places.get((name, offsets))) is None:
        raise ValueError(f"{label} has a part at {list(offsets)}, of which nothing says where it is")
    file, start, length = _text(place.relative_path), *_counts((place.offset, place.length))
    if not _DATA_FILE.fullmatch(file):
        raise ValueError(f"{label} is said to be in {printable(file[:80])!r}, which is no file of the folder")
    if length < prod(sizes) * dtype.itemsize:
        raise ValueError(f"{label} has a part {list(sizes)} that is said to have {length:,} bytes")
    if place.__dict__.get("transform_descriptors"):
        raise ValueError(f"{label} is compressed or encrypted, which gptpar does not read")
    return StoredBox((offsets, sizes), file, start, length)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value <= MAX_COUNT for value in values):
        raise ValueError(f"{printable(brief(values)[:80])} stands where whole numbers belong")
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{printable(brief(value)[:80])} stands where a name belongs")
    return value
