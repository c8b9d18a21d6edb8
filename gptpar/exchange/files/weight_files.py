"""Reads weight files by tensor name: safetensors, and the older ``.bin`` files of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gptpar.checkpoint.data_file import AlignedBuffers, piece_starts
from gptpar.checkpoint.patches import boxes_of
from gptpar.errors import CheckpointError, printable
from gptpar.exchange.files.mxfp4 import Mxfp4File
from gptpar.exchange.files.safe_pickle import is_whole, load_torch_file
from gptpar.exchange.files.safetensors_file import NAME_OF, SafetensorsFile, TensorInfo, open_safetensors
from gptpar.topology.tensor_parts import box_view

MAX_SHARED = 4
"""Tensors may share the bytes of one; tied embeddings do."""


@dataclass(frozen=True)
class TorchFile:
    """A dictionary of tensors in a file of ``torch.save``, unpickled with an allow-list; its bytes stay on the disk."""

    path: Path
    values: Mapping[str, torch.Tensor]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Number format and shape of each tensor, in the words of safetensors."""
        return {
            name: TensorInfo(NAME_OF.get(value.dtype, str(value.dtype)), tuple(value.shape))
            for name, value in self.values.items()
        }

    def part_starts(self, name: str) -> list[int]:
        """See :class:`SafetensorsFile`."""
        value = self.values[name]
        return piece_starts(0, value.numel(), value.itemsize)

    @contextmanager
    def part(
        self, name: str, start: int, stop: int, buffers: AlignedBuffers, *, past_cache: bool
    ) -> Iterator[torch.Tensor]:
        """See :class:`SafetensorsFile`; the system reads the file when the elements are used, through its cache."""
        value = self.values[name].detach()
        if value.is_contiguous():
            yield value.view(-1)[start:stop]
            return
        with buffers.take(0, (stop - start) * value.itemsize, value.itemsize) as memory:
            elements, shape = memory.view(value.dtype), tuple(value.shape)
            for box, target in boxes_of(shape, start, elements):
                target.copy_(box_view(value, box, (0,) * len(shape)))
            yield elements


WeightFile = SafetensorsFile | TorchFile | Mxfp4File
"""A file that has been opened and checked, or a tensor in MXFP4; all kinds are read by the same methods."""


def open_torch(path: Path) -> TorchFile:
    """Open a ``.bin`` file.

    Raises:
        CheckpointError: the file would run code, is damaged, or holds anything but named tensors.
    """
    content = load_torch_file(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and is_whole(value) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} holds something else than whole tensors by name")
    claimed, there = sum(tensor.nbytes for tensor in content.values()), path.stat().st_size
    if claimed > MAX_SHARED * there:
        raise CheckpointError(
            f"{path} is refused: its {len(content):,} tensors claim {claimed:,} bytes, and the file has {there:,}: "
            "they share bytes"
        )
    return TorchFile(path, content)


def open_all(paths: Iterable[Path]) -> dict[str, WeightFile]:
    """Open weight files; returns tensor name -> the file that has the tensor.

    Raises:
        CheckpointError: with all problems of all files; a tensor in two files is a problem, too.
    """
    places: dict[str, WeightFile] = {}
    problems = []
    for path in paths:
        try:
            file: WeightFile = open_torch(path) if path.suffix == ".bin" else open_safetensors(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        names = file.tensors.keys()
        if twice := places.keys() & names:
            problems.append(f"tensor {printable(min(twice))!r} is in {places[min(twice)].path.name} and in {path.name}")
        places |= dict.fromkeys(names, file)
    if problems:
        raise CheckpointError("\n".join(problems))
    return places
