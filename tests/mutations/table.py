"""All mistakes of the table, which the texts beside this file hold.

The first line of a text says what its mistakes are in. ``@ FILE`` names the file that the mistakes below it change.
A mistake is a block of lines: its name, ``-`` before the lines that are right, ``+`` before those that take their
place (none: nothing does), and ``=`` before each test that must notice it.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.mutations.mutation import Mutation


def read(path: Path) -> Iterator[Mutation]:
    """The mistakes of a text.

    Raises:
        ValueError: a block is none.
    """
    file = ""
    _, *blocks = path.read_text().strip().split("\n\n")
    for block in blocks:
        if block.startswith("@ "):
            file = block.removeprefix("@ ")
            continue
        name, *lines = block.split("\n")
        of = {sign: [line[2:] for line in lines if line[:1] == sign] for sign in "-+="}
        if not (file and of["-"] and of["="]) or len(lines) != sum(map(len, of.values())):
            raise ValueError(f"{path.name}: what begins with {name!r} is no mistake")
        yield Mutation(name, file, "\n".join(of["-"]), "\n".join(of["+"]), tuple(of["="]))


MUTATIONS = [mutation for path in sorted(Path(__file__).parent.glob("*.txt")) for mutation in read(path)]
