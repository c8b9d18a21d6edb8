"""Where a process stands on the tensor axis, and how a parameter is split over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Split:
    """How one parameter is split.

    Attributes:
        dim: the dimension that is split.
        full: its length in the whole tensor.
        start: where this rank's share begins on it.
        longest: the longest share of any rank; shares may be uneven (the vocabulary).
    """

    dim: int
    full: int
    start: int
    longest: int


@dataclass(frozen=True)
class TensorAxis:
    """This process's place on the tensor axis; by default it is alone there.

    Attributes:
        size: number of ranks that share each layer.
        rank: this process's position among them.
        group: these ranks; ``None`` when alone.
        sequence_parallel: whether each rank holds only its own tokens between layers.
        fused: whether transfers may be fused with matrix products through symmetric memory.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    fused: bool = False

    @property
    def group_name(self) -> str:
        """The group's name, by which compiled code refers to it; empty when alone."""
        return "" if self.group is None else self.group.group_name

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank holds only a share of the tokens between layers."""
        return self.sequence_parallel and self.size > 1

    def share(self, length: int) -> tuple[int, int]:
        """This rank's balanced share [start, stop) of ``length`` rows; shares differ by at most one."""
        return self.rank * length // self.size, (self.rank + 1) * length // self.size

    def split(self, dim: int, full: int) -> Split:
        """This rank's share of a parameter's dimension."""
        return Split(dim, full, self.share(full)[0], -(-full // self.size))


ALONE = TensorAxis()


def splits_of(module: nn.Module) -> dict[str, Split]:
    """How each split parameter is split, by its name inside the module; parameters not named are whole everywhere.

    Layers say it in an attribute ``splits`` (parameter name -> Split) beside their parameters.
    """
    found: dict[str, Split] = {}
    for prefix, child in module.named_modules():
        owned = {name for name, _ in child.named_parameters(recurse=False)}
        for name, split in getattr(child, "splits", {}).items():
            if name in owned:
                found[f"{prefix}.{name}" if prefix else name] = split
    return found
