"""Lets processes save and load together: an error on one rank becomes the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from gptpar.checkpoint.manifest import DamagedCheckpoint
from gptpar.checkpoint.ring import Ring
from gptpar.errors import CheckpointError, GptparError

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """The processes that save or load together: a process group, or this process where there is none.

    Args:
        moved: is called whenever this process has read or written a piece: whoever waits for it sees that it lives.
        alone: this process acts without the others, even where there is a process group.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, moved: Callable[[], None] = lambda: None, *, alone: bool = False
    ):
        self.moved = moved
        self.distributed = not alone and dist.is_available() and dist.is_initialized()
        self.group = process_group
        self.rank = dist.get_rank(process_group) if self.distributed else 0
        self.world_size = dist.get_world_size(process_group) if self.distributed else 1

    @property
    def leads(self) -> bool:
        """Whether this process runs what `lead` is given."""
        return self.rank == 0

    def each(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; every rank gets all results, in rank order.

        Raises:
            CheckpointError: on all ranks when it failed on any, with each cause.
        """
        mine = _attempt(action)
        outcomes: list[Any] = [mine]
        if self.distributed:
            outcomes = [None] * self.world_size
            dist.all_gather_object(outcomes, mine, group=self.group)
        if failures := _failures(outcomes):
            raise merge_failures(failures)
        return [value for value, _ in outcomes]

    def lead(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; every rank gets its result, or its error as a CheckpointError."""
        outcome: list[Any] = [_attempt(action) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(outcome, src=self._first, group=self.group)
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    def through_main(self, action: Callable[[], T], main: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `action` on every rank, then `main` on rank 0 with all results; rank i gets the i-th that `main` returns.

        Interrupts (Ctrl-C) on one rank end it on all ranks, too.

        Raises:
            CheckpointError: on all ranks when `action` failed on any or `main` failed, with each cause.
        """
        mine = _attempt(action, BaseException)
        outcomes: list[Any] = [mine]
        if self.distributed:
            outcomes = [None] * self.world_size
            dist.gather_object(mine, outcomes if self.rank == 0 else None, dst=self._first, group=self.group)
        if self.rank == 0:
            outcomes = _answers(outcomes, main)
        answer = outcomes[:1]
        if self.distributed:
            dist.scatter_object_list(answer, outcomes if self.rank == 0 else None, src=self._first, group=self.group)
        result, error = answer[0]
        if error is not None:
            raise error
        return result

    @property
    def _first(self) -> int:
        """Rank 0 of the group, among all processes."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)


class MachineRanks(Ranks):
    """The processes of machines that have a folder each: `lead` acts once on every machine."""

    def __init__(self, process_group: dist.ProcessGroup | None, ring: Ring, moved: Callable[[], None] = lambda: None):
        super().__init__(process_group, moved)
        self.ring = ring
        self._leader = ring.leader_of(self.rank)

    @property
    def leads(self) -> bool:
        return self.rank == self._leader

    def lead(self, action: Callable[[], T]) -> T:
        """Run `action` on each machine's first process; every rank gets its machine's result, or the error of any."""
        outcomes: list[Any] = self.each(lambda: action() if self.leads else None)
        return outcomes[self._leader]

    def main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; every rank gets its result, or its error."""
        return super().lead(action)


def as_checkpoint_error(error: BaseException) -> BaseException:
    """Convert an error to a CheckpointError; interrupts stay what they are."""
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    if isinstance(error, GptparError):
        return CheckpointError(str(error))
    return CheckpointError(f"{type(error).__name__}: {error}")


def merge_failures(failures: dict[int, BaseException]) -> BaseException:
    """One error for all ranks, with each distinct cause once. It is a DamagedCheckpoint only if all causes are.

    An interrupt is returned instead of all errors.
    """
    for error in failures.values():
        if not isinstance(error, Exception):
            return error
    ranks_of: dict[str, list[int]] = {}
    for rank, error in failures.items():
        ranks_of.setdefault(str(error), []).append(rank)
    damaged = all(isinstance(error, DamagedCheckpoint) for error in failures.values())
    kind = DamagedCheckpoint if damaged else CheckpointError
    if len(ranks_of) == 1:
        return kind(next(iter(ranks_of)))
    return kind("\n".join(f"rank {','.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()))


def _attempt(action: Callable[[], T], kind: type[BaseException] = Exception) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except kind as error:
        return None, as_checkpoint_error(error)


def _failures(outcomes: list[Any]) -> dict[int, BaseException]:
    return {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}


def _answers(outcomes: list[Any], main: Callable[[list[Any]], Sequence[Any]]) -> list[tuple[Any, BaseException | None]]:
    """The messages of rank 0 to each rank: (the rank's result of `main`, None), or (None, the error of any rank)."""
    failures = _failures(outcomes)
    if not failures:
        results, error = _attempt(lambda: main([value for value, _ in outcomes]), BaseException)
        if error is None:
            return [(result, None) for result in results or ()]
        failures = {0: error}
    return [(None, merge_failures(failures))] * len(outcomes)
