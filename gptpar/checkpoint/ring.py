"""Machines in a ring: each has a folder of its own, and keeps copies of the files of the machine before it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gptpar.checkpoint.manifest import file_of


@dataclass(frozen=True)
class Move:
    """A file's way from one process's folder into another one's.

    Attributes:
        source, target: ranks.
        name: of the file, in both folders.
        num_bytes: its length.
    """

    source: int
    target: int
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Ring:
    """Which processes are on which machine.

    Attributes:
        machines: the ranks of each machine; the last one is before the first.
    """

    machines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Ring:
        """The machines in the order of their lowest ranks.

        Args:
            names: of each rank's machine.
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
        """A process's machine, by its number in the ring."""
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)

    def leader_of(self, rank: int) -> int:
        """The process that acts for a process's machine."""
        return self.machines[self.machine_of(rank)][0]

    def before(self, machine: int) -> tuple[int, ...]:
        """The processes of the machine before; none where there is one machine."""
        return () if self.is_alone else self.machines[machine - 1]

    def kept_by(self, machine: int) -> tuple[int, ...]:
        """The processes whose files a machine keeps."""
        return self.machines[machine] + self.before(machine)

    def copies(self, sizes: Sequence[int]) -> list[Move]:
        """How each process's file comes to the next machine.

        Args:
            sizes: bytes of each rank's file; 0: it has none.
        """
        return [
            Move(rank, mine[place % len(mine)], file_of(rank), sizes[rank])
            for machine, mine in enumerate(self.machines)
            for place, rank in enumerate(self.before(machine))
            if sizes[rank]
        ]

    def repairs(
        self, wanted: Sequence[Collection[str]], held: Sequence[Collection[str]], sizes: Mapping[str, int]
    ) -> list[Move]:
        """How each machine gets the files that it wants and does not hold; the holders send about as many files each.

        Args:
            wanted, held: names of files of each machine; of each wanted one somebody holds.
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
    """Moves that can be under way at once: each process sends at most one file and takes at most one."""
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
