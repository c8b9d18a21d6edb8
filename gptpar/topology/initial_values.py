"""Draws initial values from (seed, global parameter name) alone.

Each parameter's full tensor is drawn on the CPU in fp32 from a generator of its own, so that neither the layout, nor
the device, nor the order of construction changes a single value.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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


def draw(init: Init, shape: torch.Size, seed: int, name: str) -> torch.Tensor:
    """The initial value of a parameter: fp32, on the CPU."""
    if isinstance(init, Constant):
        return torch.full(shape, init.value)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(shape).normal_(std=init.std, generator=generator)


def initialise(targets: Mapping[str, torch.Tensor | TensorParts], inits: Mapping[str, Init], seed: int) -> None:
    """Fill tensors with their initial values.

    Args:
        targets: global parameter name -> the tensor, or the parts of it that this process holds (any device and
            dtype), written in place.
        inits: global parameter name -> how it is initialised.
        seed: the run's.
    """

    def fill(name: str, target: TensorParts) -> None:
        target.fill(draw(inits[name], target.shape, seed, name))

    held = {name: parts for name, target in targets.items() if (parts := as_parts(target)).num_held}
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        for filled in [pool.submit(fill, name, parts) for name, parts in held.items()]:
            filled.result()
