"""Compares weights that several processes hold: are they still equal, bit for bit?

Data-parallel processes hold copies of the model's parameters, tensor-parallel ranks hold copies of norms and biases,
and two pipeline stages hold copies of a tied embedding. All processes make the same updates from the same sums, so
copies stay equal. An error of a processor or of a link makes them differ, and nothing else in a run would show it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from gptpar.engine.engine import Engine
from gptpar.engine.ranges import Range
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology

BLOCK = 1 << 22
"""Elements that are summed at a time: it bounds the memory of their 64-bit copies."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, str, tuple[int, ...], int, int]
"""(what, parameter, its split's position, first element in the split, number of elements)"""

Pieces = list[tuple[int, torch.Tensor]]
"""(first position, values [n])"""

MODEL, MASTER = "model parameter", "master weights of"
MAX_LISTED = 3


def checksum(values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """A 64-bit checksum of a vector's bits: int64 scalar on its device.

    The integer at position ``i`` counts ``2 i + 1`` times, modulo 2^64. So the checksum does not depend on the order of
    summation, and those of two halves add up to that of the whole. A change of one element always changes the checksum,
    because an odd factor has an inverse.

    Args:
        first: position of the first element.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.detach().view(INTEGERS[values.element_size()])
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        low = 2 * (first + start) + 1
        total += (block * torch.arange(low, low + 2 * len(block), 2, device=values.device)).sum()
    return total


class ReplicaCheck:
    """Compares checksums of the parts that more than one process holds.

    The first check finds these parts by an exchange of names. Each check sends one number for each part.
    """

    def __init__(self, engine: Engine, topology: Topology):
        self._engine, self._topology = engine, topology
        self._shared: list[list[Key]] | None = None

    def check(self, iteration: int) -> None:
        """Compare; all processes call it between two steps.

        Raises:
            GptparError: on all processes: copies differ.
        """
        size = self._topology.mesh.world_size
        if size == 1:
            return
        held = self._held()
        shared = self._shared = self._shared or self._find_shared(list(held))
        device = self._topology.device  # checksums of the host's memory travel with the device's
        mine = [
            torch.stack([checksum(values, first).to(device) for first, values in held[key]]).sum()
            for key in shared[self._topology.rank]
        ]
        longest = max(map(len, shared))
        row = torch.zeros(longest, dtype=torch.int64, device=device)
        if mine:
            row[: len(mine)] = torch.stack(mine)
        rows = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(rows, row)
        found: dict[Key, dict[int, list[int]]] = {}
        for rank, (keys, sums) in enumerate(zip(shared, (row.tolist() for row in rows), strict=True)):
            for key, value in zip(keys, sums, strict=False):  # shorter rows are filled up
                found.setdefault(key, {}).setdefault(value, []).append(rank)
        if differing := {key: ranks for key, ranks in found.items() if len(ranks) > 1}:
            raise _error(iteration, differing)

    def _held(self) -> dict[Key, Pieces]:
        """This process's weights, after the last step: model parameters, and master weights."""
        engine = self._engine
        if engine.gatherer.transient:
            engine.finish()
            shards = engine.parameters.shards
            ranges = ((one, shards[one.unit][one.start : one.stop]) for one in engine.table.ranges())
            return self._by_parameter(MODEL, ranges) | self._by_parameter(MASTER, engine.optimizer.ranges_of("weights"))
        with engine.gatherer.held():
            views = engine.parameters.views()
        whole: dict[Key, Pieces] = {
            (MODEL, name, param.info.offsets, 0, views[name].numel()): [(0, _in_memory_order(views[name]))]
            for name, param in engine.table.params.items()
        }
        return whole | self._by_parameter(MASTER, engine.optimizer.ranges_of("weights"))

    def _by_parameter(self, what: str, ranges: Iterable[tuple[Range, torch.Tensor]]) -> dict[Key, Pieces]:
        """The ranges of a parameter, however they are divided between device and host, under one key."""
        found: dict[str, Pieces] = {}
        for one, values in ranges:
            found.setdefault(one.param, []).append((one.first, values))
        offsets = {name: param.info.offsets for name, param in self._engine.table.params.items()}
        lows = {name: min(first for first, _ in pieces) for name, pieces in found.items()}
        sizes = {name: sum(len(values) for _, values in pieces) for name, pieces in found.items()}
        return {(what, name, offsets[name], lows[name], sizes[name]): pieces for name, pieces in found.items()}

    def _find_shared(self, mine: list[Key]) -> list[list[Key]]:
        """Find each rank's keys that other ranks have, too, in the same order on all of them."""
        everyone = self._topology.of_all(mine)
        count: dict[Key, int] = {}
        for keys in everyone:
            for key in keys:
                count[key] = count.get(key, 0) + 1
        return [[key for key in keys if count[key] > 1] for keys in everyone]


def _in_memory_order(view: torch.Tensor) -> torch.Tensor:
    """[n] a dense tensor's elements as they lie in memory."""
    return view.detach().as_strided((view.numel(),), (1,))


def _error(iteration: int, differing: dict[Key, dict[int, list[int]]]) -> GptparError:
    listed = [f"{what} {name} ({_sides(ranks)})" for (what, name, *_), ranks in list(differing.items())[:MAX_LISTED]]
    more = f", and {len(differing) - MAX_LISTED} more" if len(differing) > MAX_LISTED else ""
    return GptparError(
        f"after iteration {iteration} copies of the same weights differ between processes: {'; '.join(listed)}{more}. "
        "One of these machines has computed or transferred something wrong: go on from a checkpoint of before the last "
        "check that passed (--ckpt-step), without the machine that differs from the others; test its memory and GPUs."
    )


def _sides(ranks: dict[int, list[int]]) -> str:
    """``rank 1 against ranks 0, 2, 3``, the fewest first."""
    groups = sorted(ranks.values(), key=len)
    return " against ".join(f"rank{'s' * (len(g) > 1)} {', '.join(map(str, g))}" for g in groups)
