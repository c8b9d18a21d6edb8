"""Writes a checkpoint from one process, where no layout holds all of it: the result of a conversion."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import folders
from gptpar.checkpoint.assembly import Assembly, FileBlock, NewTensor, Reading, Room
from gptpar.checkpoint.data_file import DataFile
from gptpar.checkpoint.manifest import MANIFEST_NAME, Chunk, Manifest, TensorEntry, file_of
from gptpar.checkpoint.patches import ParameterView, Patch, boxes_of
from gptpar.checkpoint.tokenizer_copy import with_digests, write_copy
from gptpar.errors import CheckpointError
from gptpar.system.files import write_synced
from gptpar.system.snapshot import PIECE_BYTES
from gptpar.topology.tensor_parts import flat_boxes

_ELEMENTS = PIECE_BYTES // 8
"""Elements of a part that are taken at once."""


@dataclass(frozen=True)
class StreamedPart:
    """A view of a tensor, and its elements.

    Attributes:
        values: tensors whose elements follow each other; they may stay on the disk until they are used.
    """

    view: ParameterView
    values: Sequence[torch.Tensor]


@dataclass(frozen=True)
class ViewElements:
    """Consecutive elements of a view of a new tensor.

    Attributes:
        tensor: the new tensor.
        key: the view's name among the tensor's views.
        start, stop: number of the first element in the view, and of the one after the last.
        read: gives the elements [stop - start] in a ``with`` statement.
    """

    tensor: NewTensor
    key: str
    view: ParameterView
    start: int
    stop: int
    read: Callable[[], AbstractContextManager[torch.Tensor]]


def fill(groups: Iterable[Sequence[ViewElements]], room: Room, look: Callable[[str, int, torch.Tensor], None]) -> None:
    """Read all sources, and write all new tensors.

    Args:
        groups: each has all elements of its tensors, each once.
        look: called with a source's key and start, and its elements.
    """
    assembly = Assembly(room)

    def reading(source: ViewElements) -> Reading:
        boxes = flat_boxes(source.view.shape, source.start, source.stop)
        blocks = source.tensor.touching(source.view.elements_of_parameter(boxes))
        return Reading(blocks, partial(give, source))

    def give(source: ViewElements, blocks: Sequence[FileBlock]) -> None:
        with source.read() as values:
            look(source.key, source.start, values)
            assembly.fill(blocks, source.key, source.view.of_elements(source.start, values))

    assembly.run([reading(one) for one in group] for group in groups)


class StreamedCheckpoint:
    """The data file of a checkpoint that is being written, one tensor after the other.

    Args:
        path: the new file's path.

    Raises:
        CheckpointError: by all methods, where the system refuses.
    """

    def __init__(self, path: Path):
        self._name, self._place, self._file = path.name, 0, DataFile(path)
        self._tensors: dict[str, tuple[tuple[int, ...], NewTensor]] = {}

    def add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, views: Mapping[str, ParameterView]
    ) -> NewTensor:
        """The next tensor of the file, to be filled from views that have all of its elements."""

        def patches(start: int, values: torch.Tensor) -> dict[str, list[Patch]]:
            boxes = boxes_of(shape, start, values)
            return {key: [one for part in boxes for one in view.of_parameter(*part)] for key, view in views.items()}

        numel = torch.Size(shape).numel()
        tensor = NewTensor(self._file, self._place, dtype, numel, patches, checked=True)
        self._tensors[name] = shape, tensor
        self._file.reserve(self._place, numel * dtype.itemsize)
        self._place += numel * dtype.itemsize
        return tensor

    def write(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Sequence[StreamedPart],
        look: Callable[[str, int, torch.Tensor], None],
    ) -> None:
        """Add a tensor, and write it; memory holds no more than the tensor takes, or 64 MiB, beside the parts' values.

        Args:
            parts: they have all of its elements, each once.
            look: called with values as they are copied, the number of the first of them, and which part of the tensor
                they are from, as ``name, part 0``.
        """
        views = {f"{name}, part {number}": part.view for number, part in enumerate(parts)}
        tensor, sources = self.add(name, shape, dtype, views), list[ViewElements]()
        for (key, view), part in zip(views.items(), parts, strict=True):
            start = 0
            for values in (some for one in part.values for some in one.reshape(-1).split(_ELEMENTS)):
                sources.append(ViewElements(tensor, key, view, start, start + len(values), partial(_in_memory, values)))
                start += len(values)
        fill([sources], Room.within(torch.Size(shape).numel() * dtype.itemsize), look)

    def finish(self) -> dict[str, TensorEntry]:
        """The manifest's entries, once all is on the disk."""
        self._file.sync()
        return {name: self._entry(*one) for name, one in self._tensors.items()}

    def _entry(self, shape: tuple[int, ...], tensor: NewTensor) -> TensorEntry:
        pieces = tuple((block.num_bytes, block.crc) for block in tensor.blocks)
        return TensorEntry(tensor.dtype, shape, (Chunk((0,) * len(shape), shape, self._name, tensor.place, pieces),))

    def close(self) -> None:
        self._file.close()


@contextmanager
def _in_memory(values: torch.Tensor) -> Iterator[torch.Tensor]:
    yield values.contiguous()


def write_checkpoint(
    root: Path,
    iteration: int,
    fill: Callable[[StreamedCheckpoint], None],
    meta: dict[str, Any],
    tokenizer_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write ``root/iter_...``; it appears whole or not at all.

    Args:
        fill: adds the tensors, and fills them.
        meta, tokenizer_files: as ``save_checkpoint`` takes them.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: there is a checkpoint of this iteration, or the disk refuses its data.
        OSError: the system refuses a folder.
    """
    final = folders.checkpoint_path(root, iteration)
    if final.exists():
        raise CheckpointError(f"{final} is there already and is not overwritten; choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    temporary = folders.temporary_path(root, iteration)
    temporary.mkdir()
    try:
        file = StreamedCheckpoint(temporary / file_of(0))
        try:
            fill(file)
            entries = file.finish()
        finally:
            file.close()
        write_copy(temporary, tokenizer_files)
        manifest = Manifest(iteration, entries, with_digests(meta, tokenizer_files))
        write_synced(temporary / MANIFEST_NAME, manifest.to_json())
        folders.publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    folders.write_hint(root, iteration)
    return final
