"""Decides which machine keeps copies of which machine's files: the machines form a ring. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gptpar.checkpoint.manifest import file_of

COPIES = 2
"""Copies in memory: one that is whole, and one that is being written."""


@dataclass(frozen=True)
class Move:
    """A file to be copied from one process's folder into another's.

    Attributes:
        source, target: ranks of the two processes.
        name: the file's name, in both folders.
        num_bytes: the file's length.
    """

    source: int
    target: int
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Ring:
    """Which processes are on which machine.

    Attributes:
        machines: the ranks of each machine. The last machine comes before the first: they are a ring.
    """

    machines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Ring:
        """The machines in the order of their lowest ranks.

        Args:
            names: the name of each rank's machine.
        """
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, ranks.values())))

    @property
    def is_alone(self) -> bool:
        """Whether there is one machine, which has no neighbour."""
        return len(self.machines) == 1

    def machine_of(self, rank: int) -> int:
        """The number, in the ring, of a process's machine."""
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)

    def leader_of(self, rank: int) -> int:
        """The lowest rank of a process's machine, which acts for that machine."""
        return self.machines[self.machine_of(rank)][0]

    def before(self, machine: int) -> tuple[int, ...]:
        """The processes of the machine before this one; empty if there is only one machine."""
        return () if self.is_alone else self.machines[machine - 1]

    def kept_by(self, machine: int) -> tuple[int, ...]:
        """The processes whose files a machine keeps."""
        return self.machines[machine] + self.before(machine)

    def copies(self, sizes: Sequence[int]) -> list[Move]:
        """The moves that copy each process's file to the next machine.

        Args:
            sizes: bytes of each rank's file; 0: the rank has no file.
        """
        return [
            Move(rank, mine[place % len(mine)], file_of(rank), sizes[rank])
            for machine, mine in enumerate(self.machines)
            for place, rank in enumerate(self.before(machine))
            if sizes[rank]
        ]

    def wanted(self, read: Sequence[Collection[str]], names: Collection[str]) -> list[set[str]]:
        """The names of the files that each machine keeps, and of those that its processes read.

        Args:
            read: names of the files that each rank reads.
            names: of all files; a rank that holds no part of a tensor has none.
        """
        return [
            {name for rank in self.kept_by(machine) if (name := file_of(rank)) in names}.union(
                *(read[rank] for rank in ranks)
            )
            for machine, ranks in enumerate(self.machines)
        ]

    def repairs(
        self, wanted: Sequence[Collection[str]], held: Sequence[Collection[str]], sizes: Mapping[str, int]
    ) -> list[Move]:
        """The moves that bring each machine the files it wants and does not hold.

        Each file comes from the holder that has sent the fewest so far.

        Args:
            wanted, held: names of files, for each machine. Some machine holds each wanted file.
            sizes: bytes of each file.
        """
        moves, sent = [], [0] * len(self.machines)
        for machine, names in enumerate(wanted):
            mine = self.machines[machine]
            for place, name in enumerate(sorted(set(names) - set(held[machine]))):
                source = min((one for one, files in enumerate(held) if name in files), key=sent.__getitem__)
                theirs = self.machines[source]
                moves.append(Move(theirs[sent[source] % len(theirs)], mine[place % len(mine)], name, sizes[name]))
                sent[source] += 1
        return moves


def waves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Groups of moves that can be under way at once: in each, a process sends and receives at most one file."""
    sends: dict[int, set[int]] = {}
    takes: dict[int, set[int]] = {}
    found: list[list[Move]] = []
    for move in moves:
        busy = sends.setdefault(move.source, set()) | takes.setdefault(move.target, set())
        number = next(number for number in range(len(busy) + 1) if number not in busy)
        sends[move.source].add(number)
        takes[move.target].add(number)
        while number >= len(found):
            found.append([])
        found[number].append(move)
    yield from found
