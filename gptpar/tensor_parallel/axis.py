"""Where a process stands on the tensor axis, and what follows for the placement of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from gptpar.topology.layout import TENSOR
from gptpar.topology.placement import SAME, Gradient, Split, Sum

ADDEND = Sum(frozenset({TENSOR}))


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

    @property
    def gradient_between_layers(self) -> Gradient:
        """Of a replicated parameter that acts on hidden states between layers: a rank may have its own tokens only."""
        return ADDEND if self.splits_tokens else SAME

    @property
    def gradient_inside_layers(self) -> Gradient:
        """Of a replicated parameter that acts on what a column layer returns: a rank has its own heads or features."""
        return ADDEND if self.size > 1 else SAME


ALONE = TensorAxis()
