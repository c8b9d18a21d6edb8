"""A partial gradient that the host optimizer gets early: long before the final one, whose changes it does not know."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gptpar.offload.bucket_state import BucketState
from gptpar.offload.buckets import Bucket, buckets_of
from gptpar.offload.events import EventLog, What
from gptpar.offload.next_action import next_arrival
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition
from tests.offload_log import starts_of
from tests.unit.offload.counting import Counting, Seen
from tests.unit.offload.host_optimizers import RATES, WHOLE, FarBehind, make_host, step, submit_ones, wait_until


def test_offers_that_the_host_makes_long_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The early gradient is worked with although the complete one was offered: that is far from being computed."""
    seen, transfers = Seen(), FarBehind()
    monkeypatch.setattr(Counting, "seen", seen)
    live = {"embedding": torch.zeros(256), "layer": torch.zeros(128)}
    pieces = [OffloadedPartition(unit, len(p), (GroupRange(0, len(p), 0),), ((0, len(p)),)) for unit, p in live.items()]
    host = make_host(
        Counting(1), speculated=384, pieces=pieces, parameters=live, partial_unit="embedding", transfers=transfers
    )
    assert host.partial_unit == "embedding"
    final = torch.ones(256)
    final[32:64] = -1.0
    host.expect_step(RATES, 1.0)
    host.expect_open_ranges("embedding", np.array([[32, 64]]))
    host.submit_gradient("embedding", torch.ones(256), formed=256)
    submit_ones(host, "layer")
    host.submit_gradient("embedding", final)
    host.step(torch.tensor(0.5), RATES, 1.0)
    first, layer, second = (copy.is_made for copy in transfers.copies)
    first.set()
    wait_until(lambda: len(seen.elements) == 1)
    assert seen.elements == [224]  # beside, while the layer's is not there
    layer.set()
    wait_until(lambda: len(seen.elements) == 2)
    assert seen.elements == [224, 128] and not seen.completed
    second.set()
    transfers.computed.set()
    host.finish()
    assert seen.elements == [224, 128] and seen.completed == [32] and host.num_redone == 0
    torch.testing.assert_close(live["embedding"], -0.1 * final, rtol=1e-5, atol=0)
    assert host.steps_taken == 1
    host.close()


def test_an_early_gradient_of_which_no_changes_are_known_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in the steps after one that was clipped."""
    seen, log = Seen(), EventLog()
    monkeypatch.setattr(Counting, "seen", seen)
    pieces = [OffloadedPartition("embedding", 128, *WHOLE)]
    host = make_host(Counting(1), speculated=128, pieces=pieces, partial_unit="embedding", log=log)
    for number, (norm, told) in enumerate([(0.5, False), (2.0, True), (0.5, True)]):
        host.expect_step(RATES, 1.0)
        if told:
            host.expect_open_ranges("embedding", np.array([[0, 8]]))
        host.submit_gradient("embedding", torch.ones(128), formed=128)
        assert bool(starts_of(log, What.SUBMITTED_PARTIAL)) == (number == 1)
        if number == 1:
            wait_until(lambda: bool(starts_of(log, What.SPECULATION_BEGUN)))
        submit_ones(host, "embedding")
        step(host, norm)
        assert host.num_redone == (number >= 1) and not seen.completed
    host.close()


def test_which_gradient_arrives_next() -> None:
    """Partial ones come first, then the last layer's; one that has no room for its copy is not waited for."""

    def bucket(state: BucketState, point: str | None, *, is_partial: bool = False) -> Bucket:
        (made,) = buckets_of(
            OffloadedPartition("unit", 128, *WHOLE), torch.zeros(128), [CpuAdam(1)], torch.float32, None
        )
        made.state, made.grad = state, cast(Any, SimpleNamespace(next_point=lambda: point))
        made.partial = cast(Any, is_partial or None)
        return made

    embedding = bucket(BucketState.PARTIAL, "embedding", is_partial=True)
    first, second = (bucket(BucketState.FINAL, point) for point in ("first", "second"))
    without_room = bucket(BucketState.FINAL, None)
    assert next_arrival([embedding, first, second]) == "embedding"
    assert next_arrival([first, second, without_room]) == "second"
    assert next_arrival([without_room]) is next_arrival([]) is None
