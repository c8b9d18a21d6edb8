"""Draws initial values from (seed, global parameter name) alone.

Each parameter's full tensor is drawn on the CPU in fp32 from a generator of its own, so that neither the layout, nor
the device, nor the order of construction changes a single value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch

from gptpar.system.hashes import seed_of
from gptpar.topology.tensor_parts import TensorParts, as_parts


@dataclass(frozen=True)
class Normal:
    """Independent normal values with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


Init = Normal | Constant


PIECE = 1 << 24
"""Elements that are drawn at once, at least a row: 64 MiB. A layer's experts have 0.5 and 1 GiB in OLMoE."""
BLOCK = 16
"""torch draws normal numbers in blocks: of a multiple of this, two calls draw the same numbers as one."""


def draw(init: Init, shape: torch.Size, seed: int, name: str) -> torch.Tensor:
    """The initial value of a parameter: fp32, on the CPU."""
    pieces = [rows for _, rows in drawn_rows(init, shape, seed, name)]
    return torch.cat(pieces) if pieces[1:] else pieces[0]


def drawn_rows(init: Init, shape: torch.Size, seed: int, name: str) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, some rows) of a parameter's initial value, in order; so the value is never in memory as a whole."""
    generator, row = torch.Generator().manual_seed(seed_of(seed, name)), prod(shape[1:])
    num_rows = shape[0] if shape else 1
    at_once = max(1, PIECE // row if row and row % BLOCK == 0 else num_rows)
    for first in range(0, max(1, num_rows), at_once):
        rows = torch.empty((min(at_once, num_rows - first), *shape[1:]) if shape else shape)
        if isinstance(init, Normal):
            rows.normal_(std=init.std, generator=generator)
        else:
            rows.fill_(init.value)
        yield first, rows


def initialise(targets: Mapping[str, torch.Tensor | TensorParts], inits: Mapping[str, Init], seed: int) -> None:
    """Fill tensors with their initial values.

    Args:
        targets: global parameter name -> the tensor, or the parts of it that this process holds (any device and
            dtype), written in place.
        inits: global parameter name -> how it is initialised.
        seed: the run's.
    """

    def fill(name: str, target: TensorParts) -> None:
        for first, rows in drawn_rows(inits[name], target.shape, seed, name):
            target.fill(rows, first)

    held = {name: parts for name, target in targets.items() if (parts := as_parts(target)).num_held}
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        for filled in [pool.submit(fill, name, parts) for name, parts in held.items()]:
            filled.result()
