"""Who sits where: the grid of ranks (pure arithmetic) and the process groups made from it.

Ranks are numbered with the tensor axis fastest, then data, then pipeline: neighbours in a tensor group, which talk
most, are neighbours in the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gptpar.errors import GptparError


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; their product is the number of processes."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(data, tensor, pipeline) position of a rank."""
        return rank // self.tensor % self.data, rank % self.tensor, rank // (self.tensor * self.data)

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """The rank at a position; the inverse of :meth:`coordinates`."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def describe(self) -> str:
        """For example ``dp2 x tp2 x pp1``."""
        return f"dp{self.data} x tp{self.tensor} x pp{self.pipeline}"


@dataclass(frozen=True)
class Topology:
    """This process's place, made once at start and passed to whoever needs it.

    Attributes:
        data_group: ranks that hold the same weights and different samples; ``None`` when alone on that axis.
    """

    layout: Layout
    rank: int
    device: torch.device
    data_group: dist.ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Position on the data axis."""
        return self.layout.coordinates(self.rank)[0]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the console, the logs and the TensorBoard files."""
        return self.rank == 0

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the data axis, in place."""
        if self.data_group is not None:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def any_rank(self, yes: bool) -> bool:
        """Whether any process says yes (all must ask)."""
        if self.layout.world_size == 1:
            return yes
        votes = torch.tensor([int(yes)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())


def world_from_environment() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun set them; (0, 0, 1) without torchrun."""
    rank, local, size = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    return rank, local, size


@contextlib.contextmanager
def open_topology(layout: Layout, *, backend: str | None, timeout_minutes: float) -> Iterator[Topology]:
    """Join the other processes, and leave them in order at the end.

    A group that handles CPU tensors beside GPU tensors is ``cpu:gloo,cuda:nccl``. One process alone needs no group.
    """
    rank, local_rank, world_size = world_from_environment()
    if backend == "nccl" and not torch.cuda.is_available():
        raise GptparError("--distributed-backend nccl needs GPUs and torch sees none here: use gloo, or leave it out.")
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Topology(layout, rank, device)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=timeout_minutes)
    )
    try:
        group = dist.group.WORLD if layout.data > 1 else None
        yield Topology(layout, rank, device, group)
        dist.barrier()
    finally:
        dist.destroy_process_group()
