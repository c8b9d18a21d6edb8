"""Decides which rows of a weight or vocabulary each tensor rank holds, and which gradients the ranks sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from gptpar.topology.mesh import TENSOR
from gptpar.topology.placement import REPLICATED, Placement, Split, range_of

ADDENDS = Placement(gradient_sum=frozenset({TENSOR}))


@dataclass(frozen=True)
class TensorAxis:
    """This process's place on the tensor axis; by default it is alone there.

    Attributes:
        size: number of ranks that split each layer.
        rank: this process's position among them.
        group: the process group of these ranks; ``None`` when alone.
        sequence_parallel: whether each rank holds only its own tokens between layers (Korthikanti et al. 2022).
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
        """Whether a rank holds only some of the tokens between layers."""
        return self.sequence_parallel and self.size > 1

    @property
    def token_splits(self) -> int:
        """Number of ranks that divide the tokens between layers."""
        return self.size if self.splits_tokens else 1

    def range_of(self, length: int) -> tuple[int, int]:
        """This rank's range [start, stop) of ``length`` rows; the ranks' lengths differ by at most one."""
        return range_of(self.rank, self.size, length)

    def split_of(self, dim: int, full: int) -> Split:
        """How a dimension of length ``full`` is split; with this rank's range."""
        return Split(dim, full, self.range_of(full)[0], -(-full // self.size))

    def split(self, dim: int, full: int) -> Placement:
        """Of a parameter of which each rank has a range of a dimension of length ``full``."""
        return Placement({TENSOR: self.split_of(dim, full)})

    @property
    def between_layers(self) -> Placement:
        """Of a replicated parameter that acts on hidden states between layers, where ranks may have other tokens."""
        return ADDENDS if self.splits_tokens else REPLICATED

    @property
    def inside_layers(self) -> Placement:
        """Of a replicated parameter that acts on a column layer's output, of which ranks have different features."""
        return ADDENDS if self.size > 1 else REPLICATED


ALONE = TensorAxis()
