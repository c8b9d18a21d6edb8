"""The states of an offloaded bucket, what moves it between them, and what the updating thread does next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch

from gptpar.offload.bucket_state import HAS_FINAL, TRANSITIONS, BucketState, ForbiddenEvent, event_of_step
from gptpar.offload.buckets import Bucket, Buffers
from gptpar.offload.events import STEP_DONE, EventLog, What
from gptpar.offload.next_action import Action, late_partials, next_action, speculable
from gptpar.optim.adamw import ADAMW
from gptpar.optim.cpu_adam import CpuAdam
from tests.offload_log import starts_of
from tests.unit.offload.host_optimizers import RATES, TWO_PIECES, SlowNorm, make_host, wait_until

S, W = BucketState, What
ALLOWED = {
    S.IDLE: {W.SUBMITTED_PARTIAL, W.SUBMITTED, W.SKIPPED},
    S.PARTIAL: {W.SUBMITTED, W.SPECULATION_BEGUN, W.SKIPPED},
    S.PARTIAL_AND_FINAL: {W.SUBMITTED, W.PARTIAL_DROPPED, W.SPECULATION_BEGUN, W.UPDATE_BEGUN, W.SKIPPED},
    S.FINAL: {W.SUBMITTED, W.SPECULATION_BEGUN, W.UPDATE_BEGUN, W.AVERAGE_BEGUN, W.SKIPPED},
    S.REPLACED: {W.SUBMITTED, W.UPDATE_BEGUN, W.AVERAGE_BEGUN, W.SKIPPED},
    S.SPECULATED_PARTIAL: {W.SUBMITTED, W.SKIPPED},
    S.SPECULATED_AND_FINAL: {W.SUBMITTED, W.TAKEN_BACK, W.UPDATE_BEGUN, W.COMPLETION_BEGUN, W.COMMITTED, W.SKIPPED},
    S.SPECULATED: {W.SUBMITTED, W.TAKEN_BACK, W.UPDATE_BEGUN, W.COMMITTED, W.SKIPPED},
    S.STALE: {W.SUBMITTED, W.TAKEN_BACK, W.UPDATE_BEGUN, W.SKIPPED},
    S.COMPLETING: {W.COMMITTED},
    S.UPDATING: {W.UPDATED},
    S.AVERAGING: {W.AVERAGED},
    S.AVERAGED: {W.DIRECTED},
    S.DIRECTED: {W.UPDATE_BEGUN},
}
PATHS = [
    [(W.SUBMITTED, S.FINAL), (W.UPDATE_BEGUN, S.UPDATING), (W.UPDATED, S.IDLE)],
    [(W.SUBMITTED, S.FINAL), (W.SPECULATION_BEGUN, S.SPECULATED), (W.COMMITTED, S.IDLE)],
    [(W.SUBMITTED, S.FINAL), (W.SPECULATION_BEGUN, S.SPECULATED), (W.UPDATE_BEGUN, S.UPDATING), (W.UPDATED, S.IDLE)],
    [(W.SUBMITTED, S.FINAL), (W.SUBMITTED, S.REPLACED), (W.SUBMITTED, S.REPLACED), (W.UPDATE_BEGUN, S.UPDATING)],
    [(W.SUBMITTED, S.FINAL), (W.SPECULATION_BEGUN, S.SPECULATED), (W.SUBMITTED, S.STALE), (W.SUBMITTED, S.STALE)],
    [
        (W.SUBMITTED, S.FINAL),
        (W.SPECULATION_BEGUN, S.SPECULATED),
        (W.TAKEN_BACK, S.FINAL),
        (W.UPDATE_BEGUN, S.UPDATING),
    ],
    [(W.SUBMITTED, S.FINAL), (W.SPECULATION_BEGUN, S.SPECULATED), (W.SUBMITTED, S.STALE), (W.TAKEN_BACK, S.REPLACED)],
    [
        (W.SUBMITTED_PARTIAL, S.PARTIAL),
        (W.SPECULATION_BEGUN, S.SPECULATED_PARTIAL),
        (W.SUBMITTED, S.SPECULATED_AND_FINAL),
        (W.COMPLETION_BEGUN, S.COMPLETING),
        (W.COMMITTED, S.IDLE),
    ],
    [
        (W.SUBMITTED_PARTIAL, S.PARTIAL),
        (W.SUBMITTED, S.PARTIAL_AND_FINAL),
        (W.SPECULATION_BEGUN, S.SPECULATED_AND_FINAL),
        (W.SUBMITTED, S.STALE),
        (W.UPDATE_BEGUN, S.UPDATING),
    ],
    [(W.SUBMITTED_PARTIAL, S.PARTIAL), (W.SUBMITTED, S.PARTIAL_AND_FINAL), (W.PARTIAL_DROPPED, S.FINAL)],
    [(W.SUBMITTED_PARTIAL, S.PARTIAL), (W.SUBMITTED, S.PARTIAL_AND_FINAL), (W.SUBMITTED, S.REPLACED)],
    [
        (W.SUBMITTED, S.FINAL),
        (W.AVERAGE_BEGUN, S.AVERAGING),
        (W.AVERAGED, S.AVERAGED),
        (W.DIRECTED, S.DIRECTED),
        (W.UPDATE_BEGUN, S.UPDATING),
        (W.UPDATED, S.IDLE),
    ],
]


def make_bucket(state: BucketState, **rest: Any) -> Bucket:
    buffers = Buffers({name: torch.zeros(8) for name in ADAMW.vectors})
    return Bucket("embedding", 8, 16, (), (), CpuAdam(1), buffers, torch.zeros(8), state=state, **rest)


@pytest.mark.parametrize("path", PATHS)
def test_the_ways_through_a_step(path: Sequence[tuple[What, BucketState]]) -> None:
    bucket = make_bucket(S.IDLE)
    for what, after in path:
        bucket.advance(what)
        assert bucket.state is after


def test_every_event_in_every_state() -> None:
    """It has a state that follows, or is refused with a sentence; a step's last event leads to the beginning."""
    for state, what in product(BucketState, What):
        bucket = make_bucket(state)
        if what in ALLOWED[state]:
            bucket.advance(what)
            assert (bucket.state is S.IDLE) == (what in STEP_DONE), (state, what)
            continue
        with pytest.raises(ForbiddenEvent) as told:
            bucket.advance(what)
        assert str(told.value) == f"'{what}' cannot follow where elements 8 to 16 of embedding have '{state}'"
        assert bucket.state is state


def test_all_states_are_reached_and_left() -> None:
    reached = {S.IDLE}
    for _ in BucketState:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(BucketState)
    ends = {before for before, what in TRANSITIONS if what in STEP_DONE | {W.UPDATE_BEGUN}}
    assert ends == set(BucketState) - {S.AVERAGING, S.AVERAGED}, "a momentum is updated in steps that are taken alone"


def test_how_a_step_goes_on_from_where_a_bucket_is() -> None:
    for state, same, open_ranges in product(sorted(HAS_FINAL), (False, True), (False, True)):
        wanted = W.UPDATE_BEGUN
        if same and state is S.SPECULATED:
            wanted = W.COMMITTED
        if same and state is S.SPECULATED_AND_FINAL:
            wanted = W.COMPLETION_BEGUN if open_ranges else W.COMMITTED
        assert event_of_step(state, same, open_ranges) is wanted
        assert (state, wanted) in TRANSITIONS


@dataclass
class Copy:
    is_made: bool = True
    has_arrived: bool = True

    def made(self) -> bool:
        return self.is_made

    def arrived(self) -> bool:
        return self.has_arrived


def test_what_is_speculable() -> None:
    room = make_bucket(S.IDLE).buffers
    with_room = [make_bucket(state, double_buffer=room) for state in BucketState]
    without = [make_bucket(state) for state in BucketState]
    assert [b.state for b in speculable(with_room + without)] == [S.PARTIAL, S.PARTIAL_AND_FINAL, S.FINAL]


def test_a_partial_gradient_is_late_when_the_final_one_is_made() -> None:
    copies = [cast(Any, Copy(is_made)) for is_made in (False, True)]
    buckets = [make_bucket(state, newer=newer) for state in BucketState for newer in copies]
    assert [(b.state, b.newer) for b in late_partials(buckets)] == [(S.PARTIAL_AND_FINAL, copies[1])]


def test_what_the_thread_does_next() -> None:
    far, near = (make_bucket(S.FINAL, grad=cast(Any, Copy(has_arrived=here))) for here in (False, True))

    def action(candidates: Sequence[Bucket], told: str) -> tuple[Action, Bucket | None]:
        names = ("step_known", "on_its_way", "at_work", "taking_back", "ending")
        return next_action(candidates, **{name: name in told.split() for name in names})

    assert action([far, near], "step_known on_its_way at_work") == (Action.TAKE_STEP, None)
    assert action([far, near, near], "on_its_way at_work") == (Action.SPECULATE, near)
    assert action([far, near], "at_work ending") == (Action.FINISH_UPDATE, None)
    assert action([far], "on_its_way at_work") == (Action.FINISH_UPDATE, None)
    assert action([], "at_work taking_back") == (Action.FINISH_UPDATE, None)
    assert action([], "taking_back") == (Action.TAKE_BACK, None)
    assert action([far, near], "ending on_its_way") == (Action.END, None)
    assert action([far], "on_its_way") == (Action.WAKE, None)
    assert action([far], "") == action([], "") == (Action.WAIT, None)


def test_the_loop_is_refused_what_a_bucket_does_not_allow() -> None:
    transfers = SlowNorm()
    host = make_host(CpuAdam(1), transfers=transfers)
    host.submit_gradient("second", torch.ones(128))
    with pytest.raises(
        ForbiddenEvent, match="'step requested' cannot follow where elements 0 to 128 of first have 'no"
    ):
        host.step(torch.tensor(0.5), RATES, 1.0)
    host.submit_gradient("first", torch.ones(128))
    host.step(torch.tensor(0.5), RATES, 1.0)
    with pytest.raises(ForbiddenEvent, match="'gradient submitted' cannot follow .* of first have 'a step that is not"):
        host.submit_gradient("first", torch.ones(128))
    transfers.computed.set()
    host.finish()
    host.close()


@pytest.mark.parametrize("speculated", [False, True])
def test_a_final_gradient_that_is_replaced_closes_no_ranges(speculated: bool) -> None:
    """The open ranges were those of the partial gradient before the first final one."""
    log, transfers, live = EventLog(), SlowNorm(), torch.zeros(128)
    host = make_host(
        CpuAdam(1),
        speculated=128,
        pieces=TWO_PIECES[:1],
        transfers=transfers,
        log=log,
        parameters={"first": live},
        partial_unit="first",
    )
    if speculated:
        host.expect_step(RATES, 1.0)
    host.expect_open_ranges("first", np.array([[0, 8]]))
    host.submit_gradient("first", torch.ones(128), formed=128)
    if speculated:
        wait_until(lambda: bool(starts_of(log, What.SPECULATION_BEGUN)))
        assert starts_of(log, What.SPECULATION_BEGUN)
    host.submit_gradient("first", torch.ones(128))
    host.submit_gradient("first", -torch.ones(128))
    transfers.computed.set()
    host.step(torch.tensor(0.5), RATES, 1.0)
    host.finish()
    torch.testing.assert_close(live, torch.full((128,), 0.1), rtol=1e-5, atol=0)
    assert host.num_redone == speculated and host.steps_taken == 1
    host.close()


@pytest.mark.parametrize("kind", ["final", "replaced", "partial"])
def test_the_parameters_before_the_step_until_it_is_requested(kind: str) -> None:
    """The speculation is undone, counts as neither right nor wrong, and goes on with the next step."""
    log, live, first = EventLog(), torch.zeros(128), TWO_PIECES[:1]
    unit = "first" if kind == "partial" else None
    host = make_host(CpuAdam(1), speculated=128, pieces=first, log=log, parameters={"first": live}, partial_unit=unit)
    with host.shared.changed:  # there is nothing to undo, and nothing is held up: no forward pass waits for the thread
        forward = threading.Thread(target=host.keep_last_step, daemon=True)
        forward.start()
        forward.join(60)
        assert not forward.is_alive()
    host.expect_step(RATES, 1.0)
    if kind == "partial":
        host.expect_open_ranges("first", np.array([[0, 8]]))
    host.submit_gradient("first", torch.ones(128), formed=128 if kind == "partial" else None)
    wait_until(lambda: bool(starts_of(log, What.SPECULATION_BEGUN)))
    if kind != "final":
        host.submit_gradient("first", torch.ones(128) * (-1 if kind == "replaced" else 1))
    for _ in range(2):
        host.keep_last_step()
        assert not live.any()
    host.step(torch.tensor(0.5), RATES, 1.0)
    host.finish()
    torch.testing.assert_close(live, torch.full((128,), 0.1 if kind == "replaced" else -0.1), rtol=1e-5, atol=0)
    assert len(log.of(What.TAKEN_BACK)) == 1 and (host.num_redone, host.num_ahead, host.steps_taken) == (0, 0, 1)
    host.expect_step(RATES, 1.0)
    host.submit_gradient("first", torch.ones(128))
    wait_until(lambda: len(log.of(What.SPECULATION_BEGUN)) == 2)
    host.step(torch.tensor(0.5), RATES, 1.0)
    host.finish()
    assert (host.num_redone, host.num_ahead, host.steps_taken) == (0, 128, 2)
    host.close()


def test_a_gradient_that_replaces_a_replacing_one_releases_its_memory() -> None:
    released: list[int] = []

    class Kept:
        def __init__(self, number: int):
            self.number = number

        def release(self) -> None:
            released.append(self.number)

    bucket = make_bucket(S.IDLE)
    for number in range(4):
        bucket.take(cast(Any, Kept(number)))
    assert released == [1, 2]
    bucket.use_newer()
    assert released == [1, 2, 0] and bucket.grad is not None and cast(Any, bucket.grad).number == 3
    bucket.forget_gradient()
    assert released == [1, 2, 0, 3]


def test_waiting_again_costs_nothing_and_changes_nothing() -> None:
    """Also by several threads at once, as a forward pass and its prefetch do it."""
    log, live = EventLog(), {"first": torch.zeros(128), "second": torch.zeros(128)}
    host = make_host(CpuAdam(1), log=log, parameters=live)
    for unit in live:
        host.submit_gradient(unit, torch.ones(128))
    host.step(torch.tensor(0.5), RATES, 1.0)
    threads = [threading.Thread(target=host.wait, args=("first",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    host.finish()
    before = {unit: values.clone() for unit, values in live.items()}
    for _ in range(3):
        host.wait("first", block=True)
    assert all(torch.equal(live[unit], values) for unit, values in before.items())
    assert len(log.of(What.UPDATED)) == 2 and len(log.of(What.WAITED, unit="first")) == 7
    host.close()


def test_a_step_after_a_clipped_one_does_not_speculate() -> None:
    """Neither do others, until one is not clipped, whether or not it has speculated; a skipped step changes nothing."""
    log = EventLog()
    host = make_host(CpuAdam(1), speculated=128, pieces=TWO_PIECES[:1], log=log)
    norms = {0: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 8: float("nan"), 10: 2.0, 11: float("nan")}
    speculated = []
    for step in range(14):
        host.expect_step(RATES, 1.0)
        host.submit_gradient("first", torch.ones(128))
        before = len(speculated)
        wait_until(lambda before=before: host.shared.backs_off or len(log.of(What.SPECULATION_BEGUN)) > before)
        speculated += [step] * (len(log.of(What.SPECULATION_BEGUN)) - before)
        host.step(torch.tensor(norms.get(step, 0.5)), RATES, 1.0)
        host.finish()
    assert speculated == [0, 2, 3, 7, 8, 9, 10, 13] and host.num_redone == 3
    host.close()
