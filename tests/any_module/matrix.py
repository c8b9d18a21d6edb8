"""Runs cases in processes that stay, beside references that are computed once."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import Deviations, problems
from tests.any_module.harness import GPTPAR, worst_of_ranks
from tests.any_module.on_rank import Kind, reference_on_rank, resume_half, run_case, save_half
from tests.any_module.reference import Trace, ranks_agree
from tests.spawn import RankPool


class Bench:
    """A pool of processes for each number of them, and the references computed so far.

    Args:
        engine: see :func:`~tests.any_module.harness.initializer`.
        timeout_s: of one case.
    """

    def __init__(self, engine: str = GPTPAR, timeout_s: float = 180.0):
        self.engine, self._timeout_s = engine, timeout_s
        self._pools: dict[int, RankPool] = {}
        self._references: dict[Any, Trace] = {}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, keep: int = 0) -> None:
        """End the processes but those of pools of ``keep`` or fewer."""
        for size, pool in self._pools.items():
            if size > keep:
                pool.close()

    def on_ranks(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(rank, *args)`` on each rank; see :meth:`RankPool.run`."""
        return self._pools.setdefault(world, RankPool(world)).run(fn, *args, timeout_s=self._timeout_s)

    def reference(self, name: str, setup: Setup) -> Trace:
        """In plain torch; stage and CPU share play no part."""
        key = name, replace(setup, stage=0, ratio=0.0, saved_by=None)
        if key not in self._references:
            # In a rank: with another number of threads, sums in fp32 are rounded in another order.
            (self._references[key],) = self.on_ranks(1, reference_on_rank, *key)
        return self._references[key]

    def deviations(self, name: str, setup: Setup, kind: Kind | None = None) -> Deviations:
        """Train a case with the engine and compare.

        Args:
            name: of the case.
            kind: of training, in place of the case's own; a scenario does more than train, with the same result.

        Raises:
            AssertionError: a rank failed, or ranks hold different weights.
        """
        wanted, traces = self.reference(name, setup), self.train(name, setup, kind)
        if setup.saved_by is not None and setup.saved_by.world != setup.world:
            # The first process had other batches in the first half, and buffers are of what it had.
            wanted, traces = replace(wanted, buffers={}), [replace(trace, buffers={}) for trace in traces]
        return worst_of_ranks(traces, wanted)

    def train(self, name: str, setup: Setup, kind: Kind | None = None) -> list[Trace]:
        """With the engine: each rank's trace; see :meth:`deviations`."""
        if setup.saved_by is None:
            return _agreed(self.on_ranks(setup.world, run_case, name, setup, self.engine, kind))
        assert kind is None, "a scenario that is resumed has no meaning yet"
        with tempfile.TemporaryDirectory(prefix="gptpar-halves-") as folder:
            before = setup.saved_by
            (first, *_) = _agreed(self.on_ranks(before.world, save_half, name, before, self.engine, folder))
            seconds = _agreed(self.on_ranks(setup.world, resume_half, name, setup, self.engine, folder))
            return [first.then(second) for second in seconds]

    def check(self, name: str, setup: Setup, kind: Kind | None = None) -> None:
        """The same, as an assertion."""
        bad = problems(self.deviations(name, setup, kind), CASES[name].tolerance)
        assert not bad, f"{name}, {setup}: {bad}"


def _agreed(traces: list[Trace]) -> list[Trace]:
    assert ranks_agree(traces), "the ranks hold different weights"
    return traces
