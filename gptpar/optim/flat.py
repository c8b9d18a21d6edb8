"""Where each parameter lies in the flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Elements; every parameter starts on a multiple, so that its views are aligned for vector and tensor-core loads."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place: ``buffer[start:stop]`` viewed as ``shape``."""

    start: int
    stop: int
    shape: torch.Size


@dataclass(frozen=True)
class FlatLayout:
    """All parameters of a stage in one range, those with weight decay first.

    Within each half the order is the reverse of the forward pass: gradients arrive in the order in which they lie, so a
    contiguous piece of the buffer is complete as early as it can be.

    Attributes:
        decayed: length of the part with weight decay.
        length: length of the whole.
    """

    slots: dict[str, Slot]
    decayed: int
    length: int

    @staticmethod
    def of(shapes: Mapping[str, torch.Size]) -> FlatLayout:
        """Lay out parameters.

        Args:
            shapes: global name -> full shape, in forward order.
        """
        backwards = list(shapes)[::-1]
        names = [name for decays in (True, False) for name in backwards if has_decay(name, shapes[name]) is decays]
        slots: dict[str, Slot] = {}
        start = decayed = 0
        for name in names:
            stop = start + math.prod(shapes[name])
            slots[name] = Slot(start, stop, shapes[name])
            start = -(-stop // ALIGNMENT) * ALIGNMENT
            if has_decay(name, shapes[name]):
                decayed = start
        return FlatLayout(slots, decayed, start)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's view of a buffer of this layout."""
        return {name: buffer[slot.start : slot.stop].view(slot.shape) for name, slot in self.slots.items()}


def l2_norm(buffer: torch.Tensor) -> torch.Tensor:
    """L2 norm of a whole buffer of such a layout, as an fp64 scalar; what lies between the parameters must be zero.

    On a CPU summed by rows first: over a long fp32 vector torch's kernel drifts there (0.4 % at 50M elements, 6 % at
    350M), which would clip by the wrong norm. A GPU's kernel sums as a tree, and is slow for short rows.
    """
    if not buffer.is_cuda:
        buffer = torch.linalg.vector_norm(buffer.view(-1, ALIGNMENT), dim=1)
        return torch.linalg.vector_norm(buffer, dtype=torch.float64)
    return torch.linalg.vector_norm(buffer).double()


def has_decay(name: str, shape: torch.Size) -> bool:
    """Whether weight decay applies: not to biases, not to vectors (Megatron's rule), judged on the full shape."""
    return len(shape) > 1 and not name.endswith(".bias")
