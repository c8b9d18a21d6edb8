"""Reads tensors that are stored in MXFP4: 32 neighbouring numbers of 4 bits share a power of two.

A tensor ``x`` of shape [experts, rows, columns] is stored as ``x_blocks``, uint8 [experts, rows, columns / 32, 16], and
``x_scales``, uint8 [experts, rows, columns / 32]. Of a byte, the lower half is the first number. A scale s means
2^(s - 127), and 255 is NaN. All values are exact in bf16.
Format: "OCP Microscaling Formats (MX)", version 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from gptpar.checkpoint.data_file import AlignedBuffers
from gptpar.exchange.files.safetensors_file import SafetensorsFile, TensorInfo

File = TypeVar("File")
BLOCK, BLOCK_BYTES = 32, 16
BLOCKS, SCALES = "_blocks", "_scales"
PART = 1 << 20
"""Elements that are read at once."""

_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_NUMBERS = torch.tensor([*_SIZES, *(-size for size in _SIZES)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)], 1)
"""[256, 2] the numbers of a byte."""
_POWERS = torch.tensor([*(2.0 ** (scale - 127) for scale in range(255)), torch.nan], dtype=torch.bfloat16)


@dataclass(frozen=True)
class Mxfp4File:
    """One tensor in MXFP4, which is read as one of bf16; it has the name of its blocks."""

    blocks: SafetensorsFile
    scales: SafetensorsFile
    name: str

    @property
    def path(self) -> Path:
        """The file of the blocks."""
        return self.blocks.path

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Number format and shape of the tensor as it is read."""
        *shape, count, _ = self.blocks.tensors[self.name].shape
        return {self.name: TensorInfo("BF16", (*shape, count * BLOCK))}

    def part_starts(self, name: str) -> list[int]:
        """See :class:`SafetensorsFile`."""
        return list(range(0, prod(self.tensors[name].shape), PART))

    @contextmanager
    def part(
        self, name: str, start: int, stop: int, buffers: AlignedBuffers, *, past_cache: bool
    ) -> Iterator[torch.Tensor]:
        """See :class:`SafetensorsFile`; parts begin and end with blocks, and are read through the system's cache."""
        first, count = start // BLOCK, (stop - start) // BLOCK
        with buffers.take(0, count * (BLOCK_BYTES + 1)) as memory:
            blocks, scales = memory.split([count * BLOCK_BYTES, count])
            self.blocks.read(name, first * BLOCK_BYTES, blocks)
            self.scales.read(name.removesuffix(BLOCKS) + SCALES, first, scales)
            numbers = _PAIRS.index_select(0, blocks.int()).view(count, BLOCK)
            yield numbers.mul_(_POWERS.index_select(0, scales.int())[:, None]).view(-1)


def with_mxfp4(files: Mapping[str, File]) -> dict[str, File | Mxfp4File]:
    """Tensor name -> its file, with one tensor in place of blocks and scales that belong together."""
    found: dict[str, File | Mxfp4File] = dict(files)
    for name, blocks in files.items():
        of_scales = name.removesuffix(BLOCKS) + SCALES
        scales = files.get(of_scales) if name.endswith(BLOCKS) else None
        if not isinstance(blocks, SafetensorsFile) or not isinstance(scales, SafetensorsFile):
            continue
        one, other = blocks.tensors[name], scales.tensors[of_scales]
        if one.dtype == other.dtype == "U8" and other.shape and one.shape == (*other.shape, BLOCK_BYTES):
            found[name] = Mxfp4File(blocks, scales, name)
            del found[of_scales]
    return found
