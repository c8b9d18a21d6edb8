"""Makes the process groups of a mesh's axes, and finds this process's place on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gptpar.topology.mesh import COPIES, PIPELINE, TENSOR, Mesh, rows_of
from gptpar.topology.world import Facts, open_world

# torch 2.13 renamed these two and warns at the old names, which torch 2.11 needs.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A one-way connection between neighbouring stages, with a communicator of its own.

    Attributes:
        peer: the rank at the other end.
        group: of this process and the peer.
    """

    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Links:
    """A stage's connections: activations come from the previous stage and go to the next, gradients the other way.

    Every link has its own communicator, so that a transfer that waits holds up no other one. After the last stage comes
    the first: interleaved schedules use this link.
    """

    activations_in: Link
    activations_out: Link
    gradients_in: Link
    gradients_out: Link


@dataclass(frozen=True)
class Topology:
    """This process's place on all axes, made once at start and passed to the code that needs it.

    Attributes:
        mesh: of all ranks.
        rank: this process's.
        device: where it computes.
        groups: rows -> this process's group on them; ``None`` when alone there. Empty where nothing is exchanged.
        links: connections to the neighbouring stages; ``None`` without a pipeline.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    links: Links | None = None
    _stage_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    def position(self, axis: str) -> int:
        """This process's position on an axis."""
        return self.mesh.position(self.rank, axis)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one by their positions on these axes alone; ``None`` when alone there.

        Raises:
            KeyError: no group was made for these axes.
        """
        rows = rows_of(axes)
        if self.groups and rows not in self.groups and self.mesh.size(*axes) > 1:
            raise KeyError(f"no group was made of the axes {axes}: make_topology made those of {list(self.groups)}")
        return self.groups.get(rows)

    @property
    def stage(self) -> int:
        """Position on the pipeline axis."""
        return self.position(PIPELINE)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the console, the logs and the TensorBoard files."""
        return self.rank == 0

    def join(self, *axes: str) -> None:
        """Make the group of several axes, if there is none; all processes call this together, for the same axes."""
        rows = self.mesh.divided(axes)
        if rows and rows not in self.groups:
            self.groups[rows] = _my_group(self.mesh.groups(*rows), self.rank)

    def group_of_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of this process's chain of stages that holds the processes at the given stages.

        Every process calls this for the same stages in the same order.

        Returns:
            ``None`` if this process is not among them, or alone.
        """
        key = tuple(stages)
        if key not in self._stage_groups:
            chains = self.mesh.groups(PIPELINE)
            self._stage_groups[key] = _my_group([[chain[s] for s in key] for chain in chains], self.rank)
        return self._stage_groups[key]

    def sum_over_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.mesh.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_over_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes that hold the same weights and read different tokens, in place."""
        if (group := self.group(*COPIES)) is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    @property
    def votes_device(self) -> torch.device:
        """The device of sums for a decision: the host, unless the caller's group takes GPU tensors alone."""
        takes_host = self.mesh.world_size == 1 or "cpu:" in dist.get_backend_config()
        return torch.device("cpu") if takes_host else self.device

    def of_all(self, mine: T) -> list[T]:
        """What each process says, by rank; all call this together."""
        everyone = [mine] * self.mesh.world_size
        if len(everyone) > 1:
            dist.all_gather_object(everyone, mine)
        return everyone

    def any_rank(self, yes: bool) -> bool:
        """Whether any process says yes; all processes call this together."""
        if self.mesh.world_size == 1:
            return yes
        votes = torch.tensor([int(yes)], device=self.votes_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())


def make_topology(mesh: Mesh, rank: int, device: torch.device) -> Topology:
    """Create the groups of a mesh; all processes call it together, after ``init_process_group``."""
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
    for rows in (*(rows for count in range(len(COPIES)) for rows in combinations(COPIES, count + 1)), (TENSOR,)):
        several = mesh.divided(rows)
        groups[rows] = groups[several] if several in groups else _my_group(mesh.groups(*rows), rank)
    return Topology(mesh, rank, device, groups, links=_make_links(mesh, rank, device) if mesh.pipeline > 1 else None)


def _my_group(rank_lists: Iterable[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Create a group for each list, which all processes do together; returns this rank's, ``None`` if it is alone."""
    mine = None
    for ranks in rank_lists:
        if len(ranks) == 1:
            continue
        group = dist.group.WORLD if len(ranks) == dist.get_world_size() else _new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group with the world's timeout, since torch's default of 30 minutes ignores what the user has set."""
    world = dist.group.WORLD
    assert world is not None
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    timeout = None if options is None else options._timeout  # not every backend has options
    return dist.new_group(list(ranks), timeout=timeout)


def _make_links(mesh: Mesh, rank: int, device: torch.device) -> Links:
    """The links of this process, each used once: NCCL connects at the first transfer, and waits for the peer.

    Inside a schedule that wait might never end, because two stages may first need different links. Here all processes
    use the links in the same order.
    """
    hello = torch.zeros(1, device=device)
    stages = mesh.pipeline
    found: dict[str, Link] = {}
    for chain in mesh.groups(PIPELINE):
        for stage in range(stages):
            here, there = chain[stage], chain[(stage + 1) % stages]
            for out, into, sender, receiver in (
                ("activations_out", "activations_in", here, there),
                ("gradients_out", "gradients_in", there, here),
            ):
                group = _new_group([sender, receiver])
                if rank == sender:
                    found[out] = Link(receiver, group)
                    dist.send(hello, receiver, group=group)
                if rank == receiver:
                    found[into] = Link(sender, group)
                    dist.recv(hello, sender, group=group)
    return Links(**found)


@contextlib.contextmanager
def open_topology(
    mesh: Mesh, *, backend: str | None, timeout_minutes: float, facts: Facts = dict
) -> Iterator[Topology]:
    """Join the other processes and create the mesh's groups; leave the processes in order at the end.

    Args:
        backend, timeout_minutes, facts: see :func:`gptpar.topology.world.open_world`.
    """
    with open_world(backend, timeout_minutes, facts) as (rank, device):
        yield make_topology(mesh, rank, device)
