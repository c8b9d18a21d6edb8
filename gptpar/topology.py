"""Who sits where: the grid of ranks (pure arithmetic) and the process groups made from it.

Ranks are numbered with the tensor axis fastest, then data, then pipeline: neighbours in a tensor group, which talk
most, are neighbours in the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gptpar.errors import GptparError
from gptpar.host import local_rank

# torch 2.13 renamed these two and warns at the old names, which torch 2.11 needs.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same weights and different samples."""
        return [
            [self.rank(d, t, p) for d in range(self.data)] for p in range(self.pipeline) for t in range(self.tensor)
        ]

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each layer."""
        return [
            [self.rank(d, t, p) for t in range(self.tensor)] for p in range(self.pipeline) for d in range(self.data)
        ]

    def chains(self) -> list[list[int]]:
        """Ranks that pass activations to each other, by stage."""
        return [
            [self.rank(d, t, p) for p in range(self.pipeline)] for d in range(self.data) for t in range(self.tensor)
        ]

    def describe(self) -> str:
        """For example ``dp2 x tp2 x pp1``."""
        return f"dp{self.data} x tp{self.tensor} x pp{self.pipeline}"


@dataclass(frozen=True)
class Link:
    """A one-way connection between neighbouring stages, with a communicator of its own.

    Attributes:
        peer: the rank at the other end.
    """

    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Links:
    """A stage's connections: activations come from the previous stage and go to the next, gradients the other way.

    Every link has its own communicator, so that nothing that waits can hold up anything else. The last stage's next
    one is the first (which interleaved schedules use).
    """

    activations_in: Link
    activations_out: Link
    gradients_in: Link
    gradients_out: Link


@dataclass(frozen=True)
class Topology:
    """This process's place, made once at start and passed to whoever needs it.

    Attributes:
        data_group: ranks that hold the same weights and different samples; ``None`` when alone on that axis.
        tensor_group: ranks that share each layer; ``None`` when alone on that axis.
        links: connections to the neighbouring stages; ``None`` without a pipeline.
    """

    layout: Layout
    rank: int
    device: torch.device
    data_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    links: Links | None = None
    _stage_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def data_rank(self) -> int:
        """Position on the data axis."""
        return self.layout.coordinates(self.rank)[0]

    @property
    def tensor_rank(self) -> int:
        """Position on the tensor axis."""
        return self.layout.coordinates(self.rank)[1]

    @property
    def stage(self) -> int:
        """Position on the pipeline axis."""
        return self.layout.coordinates(self.rank)[2]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the console, the logs and the TensorBoard files."""
        return self.rank == 0

    def group_of_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of the processes at some stages of each chain; every process calls it, in the same order.

        Returns:
            The group this process belongs to, or ``None``.
        """
        key = tuple(stages)
        if key not in self._stage_groups:
            chains = self.layout.chains()
            self._stage_groups[key] = _my_group([[chain[s] for s in key] for chain in chains], self.rank)
        return self._stage_groups[key]

    def sum_over_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.layout.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any_rank(self, yes: bool) -> bool:
        """Whether any process says yes (all must ask)."""
        if self.layout.world_size == 1:
            return yes
        votes = torch.tensor([int(yes)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())


def make_topology(layout: Layout, rank: int, device: torch.device) -> Topology:
    """Create the groups of a layout; every process calls it, after ``init_process_group`` if there are several."""
    return Topology(
        layout,
        rank,
        device,
        data_group=_my_group(layout.data_groups(), rank),
        tensor_group=_my_group(layout.tensor_groups(), rank),
        links=_make_links(layout, rank, device) if layout.pipeline > 1 else None,
    )


def _my_group(rank_lists: Iterable[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Create a group for each list, in which all processes take part; ``None`` for a process that is alone in its."""
    mine = None
    for ranks in rank_lists:
        if len(ranks) == 1:
            continue
        group = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
        if rank in ranks:
            mine = group
    return mine


def _make_links(layout: Layout, rank: int, device: torch.device) -> Links:
    """The links of this process, each tried once: NCCL connects at the first transfer, and waits there for the peer.

    In the middle of a schedule, where two stages may first need different links, that wait would never end; here all
    processes go through the links in one order.
    """
    hello = torch.zeros(1, device=device)
    stages = layout.pipeline
    found: dict[str, Link] = {}
    for chain in layout.chains():
        for stage in range(stages):
            here, there = chain[stage], chain[(stage + 1) % stages]
            for out, into, sender, receiver in (
                ("activations_out", "activations_in", here, there),
                ("gradients_out", "gradients_in", there, here),
            ):
                group = dist.new_group([sender, receiver])
                if rank == sender:
                    found[out] = Link(receiver, group)
                    dist.send(hello, receiver, group=group)
                if rank == receiver:
                    found[into] = Link(sender, group)
                    dist.recv(hello, sender, group=group)
    return Links(**found)


def world_from_environment() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun, mpirun or srun set them; (0, 0, 1) for a process on its own.

    Raises:
        GptparError: with everything that is wrong with these variables.
    """
    environment = os.environ
    if problems := environment_problems(environment, torch.cuda.device_count()):
        raise GptparError(
            f"the environment describes no process of a run: {'; '.join(problems)}. Start the processes with torchrun "
            "or gptpar launch, which set these variables; set what is missing; or unset RANK, LOCAL_RANK and "
            "WORLD_SIZE for a run on this machine alone."
        )
    if "RANK" not in environment:
        return 0, 0, 1
    return int(environment["RANK"]), local_rank(environment) or 0, int(environment["WORLD_SIZE"])


def environment_problems(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """What is wrong with the variables that say which process of which run this is.

    Args:
        num_gpus: that this process sees.
    """
    names = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environment]
    problems = [f"{n}={environment[n]} is not a whole number" for n in names if not environment[n].isdecimal()]
    if ("RANK" in names) != ("WORLD_SIZE" in names):
        problems.append("of RANK and WORLD_SIZE only one is set")
    if "RANK" not in names or "WORLD_SIZE" not in names:
        return problems
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if not problems and int(rank) >= int(size):
        problems.append(f"RANK={rank} is not below WORLD_SIZE={size}")
    if size == "1":
        return problems
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        problems.append(f"{' and '.join(missing)} not set, where the processes meet")
    elif not environment["MASTER_PORT"].isdecimal():
        problems.append(f"MASTER_PORT={environment['MASTER_PORT']} is not a whole number")
    if num_gpus > 1 and local_rank(environment) is None:
        problems.append(f"LOCAL_RANK is not set, which says which of {num_gpus} GPUs is this process's own")
    return problems


@contextlib.contextmanager
def open_world(backend: str | None, timeout_minutes: float) -> Iterator[tuple[int, torch.device]]:
    """Join the other processes, and leave them in order at the end; yields this process's rank and device.

    A group that handles CPU tensors beside GPU tensors is ``cpu:gloo,cuda:nccl``. One process alone needs no group.

    Raises:
        GptparError: the environment or the backend cannot be, or the processes did not meet.
    """
    rank, place, world_size = world_from_environment()
    if backend == "nccl" and not torch.cuda.is_available():
        raise GptparError("--distributed-backend nccl needs GPUs and torch sees none here: use gloo, or leave it out.")
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", place % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield rank, device
        return
    _meet("cpu:gloo,cuda:nccl" if on_gpu else "gloo", datetime.timedelta(minutes=timeout_minutes))
    try:
        yield rank, device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def join_world(timeout_minutes: float) -> tuple[int, torch.device]:
    """Join the other processes, unless the caller has; this process's rank and device.

    Raises:
        GptparError: the environment cannot be, or the processes did not meet.
    """
    if not dist.is_initialized():
        rank, place, world_size = world_from_environment()
        device = _device_of(place) if torch.cuda.is_available() else torch.device("cpu")
        if world_size > 1:
            on_gpu = device.type == "cuda"
            _meet("cpu:gloo,cuda:nccl" if on_gpu else "gloo", datetime.timedelta(minutes=timeout_minutes))
        return rank, device
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return dist.get_rank(), _device_of(local_rank(os.environ)) if on_gpu else torch.device("cpu")


def _device_of(place: int | None) -> torch.device:
    """This process's GPU, made the current one; ``place``: among the machine's processes."""
    current = torch.cuda.current_device() if place is None else place % torch.cuda.device_count()
    torch.cuda.set_device(current)
    return torch.device("cuda", current)


def _meet(backend: str, timeout: datetime.timedelta) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise GptparError(
            f"the processes did not meet at {where} ({str(error).splitlines()[0]}): see that rank 0 runs there and can "
            "be reached by all, and that no other program has this port (else choose another MASTER_PORT)."
        ) from error


@contextlib.contextmanager
def open_topology(layout: Layout, *, backend: str | None, timeout_minutes: float) -> Iterator[Topology]:
    """Join the other processes and create the layout's groups; leave in order at the end."""
    with open_world(backend, timeout_minutes) as (rank, device):
        yield make_topology(layout, rank, device)
