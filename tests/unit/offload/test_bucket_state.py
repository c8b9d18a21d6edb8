"""Offloaded buckets between their states: parameters before a step, steps after a clipped one."""

import threading

import numpy as np
import pytest
import torch

from gptpar.offload.events import EventLog, What
from gptpar.optim.cpu_adam import CpuAdam
from tests.offload_log import starts_of
from tests.unit.offload.host_optimizers import RATES, TWO_PIECES, make_host, step, submit_ones, wait_until


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
    step(host)
    torch.testing.assert_close(live, torch.full((128,), 0.1 if kind == "replaced" else -0.1), rtol=1e-5, atol=0)
    assert len(log.of(What.TAKEN_BACK)) == 1 and (host.num_redone, host.num_ahead, host.steps_taken) == (0, 0, 1)
    host.expect_step(RATES, 1.0)
    submit_ones(host, "first")
    wait_until(lambda: len(log.of(What.SPECULATION_BEGUN)) == 2)
    step(host)
    assert (host.num_redone, host.num_ahead, host.steps_taken) == (0, 128, 2)
    host.close()


def test_a_gradient_in_place_of_one_that_followed_an_unused_partial_one() -> None:
    """Only the last one counts, and nothing is speculated with it, because another may follow."""
    log, live = EventLog(), {"first": torch.zeros(128), "second": torch.zeros(128)}
    host = make_host(CpuAdam(1), speculated=256, pieces=TWO_PIECES, log=log, parameters=live, partial_unit="first")
    host.expect_step(RATES, 1.0)
    host.expect_open_ranges("first", np.array([[0, 8]]))
    with host.shared.changed:  # the thread sees nothing before all is there
        host.submit_gradient("first", torch.full((128,), 3.0), formed=128)
        host.submit_gradient("first", torch.full((128,), 2.0))
        host.submit_gradient("first", -torch.ones(128))
        submit_ones(host, "second")
    wait_until(lambda: bool(starts_of(log, What.SPECULATION_BEGUN)))  # in forward order
    step(host)
    torch.testing.assert_close(live["first"], torch.full((128,), 0.1), rtol=1e-5, atol=0)
    assert {event.unit for event in log.of(What.SPECULATION_BEGUN)} == {"second"} and host.num_redone == 0
    host.close()


def test_a_step_after_a_clipped_one_does_not_speculate() -> None:
    """Neither do others, until one is not clipped, whether or not it has speculated; a skipped step changes nothing."""
    log = EventLog()
    host = make_host(CpuAdam(1), speculated=128, pieces=TWO_PIECES[:1], log=log)
    norms = {0: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 8: float("nan"), 10: 2.0, 11: float("nan")}
    speculated = []
    for number in range(14):
        host.expect_step(RATES, 1.0)
        submit_ones(host, "first")
        before = len(speculated)
        wait_until(lambda before=before: host.shared.backs_off or len(log.of(What.SPECULATION_BEGUN)) > before)
        speculated += [number] * (len(log.of(What.SPECULATION_BEGUN)) - before)
        step(host, norms.get(number, 0.5))
    assert speculated == [0, 2, 3, 7, 8, 9, 10, 13] and host.num_redone == 3
    host.close()
