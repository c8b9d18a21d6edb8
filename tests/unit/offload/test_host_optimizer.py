"""The host optimizer alone: its thread, its buckets, and what is copied."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gptpar.offload.events import STEP_DONE, EventLog, What
from gptpar.offload.kernel_queue import MAX_QUEUED
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done
from gptpar.optim.group_ranges import OffloadedPartition
from tests.unit.offload.host_optimizers import RATES, WHOLE, SlowNorm, make_host, step, submit_ones, wait_until


def test_a_thread_that_reads_the_state_does_not_take_the_loops_waits_for_copies() -> None:
    """The loop's stream has to wait for the new parameters all the same, of each unit for its own."""
    host = make_host(CpuAdam())
    submit_ones(host, "second", "first")
    host.step(torch.tensor(0.5), RATES, 1.0)
    values = [values.clone() for _, _, values in host.parts("weights", beside_loop=True)]
    torch.testing.assert_close(torch.cat(values), torch.full((256,), -0.1), rtol=1e-5, atol=0)
    assert all(bucket.sent is not None for bucket in host._buckets)
    host.wait("first")
    assert [bucket.sent is None for bucket in host._buckets] == [True, False]
    list(host.parts("weights"))
    assert all(bucket.sent is None for bucket in host._buckets)
    host.close()


def test_speculation_goes_on_while_the_device_computes_the_norm() -> None:
    """The training loop has requested the step long before that, and says what the one after it will be."""
    log, transfers, live = EventLog(), SlowNorm(), {"first": torch.zeros(128), "second": torch.zeros(128)}
    host = make_host(CpuAdam(1), speculated=256, transfers=transfers, parameters=live, log=log)
    host.expect_step(RATES, 1.0)
    with host.without_speculation():
        submit_ones(host, "second", "first")
        host.step(torch.tensor(0.5), RATES, 1.0)
        of_the_step_after_it = AdamHyperparameters(lr=1.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
        host.expect_step((of_the_step_after_it,), 1.0)
    wait_until(lambda: len(log.of(What.SPECULATION_BEGUN)) == 2)
    transfers.computed.set()
    host.finish()
    assert host.updates() == (256, 256) and host.num_redone == 0
    torch.testing.assert_close(live["second"], torch.full((128,), -0.1), rtol=1e-5, atol=0)
    host.close()


def test_the_thread_waits_for_several_updates_at_once_while_gradients_come() -> None:
    """Each wait costs the backward pass Python's lock. After the request it waits for each, since the loop does."""
    ordered: list[int] = []
    waited: list[int] = []
    gate = threading.Event()

    class Gated(CpuAdam):
        def order(self, *args: Any, **kwargs: Any) -> Callable[[], Done]:
            number, wait = len(ordered), super().order(*args, **kwargs)
            ordered.append(number)

            def wait_for_gate() -> Done:
                waited.append(number)
                assert gate.wait(10)
                return wait()

            return wait_for_gate

    pieces = [OffloadedPartition(str(n), 128, *WHOLE) for n in range(2 * MAX_QUEUED + 2)]
    units, transfers = [piece.unit for piece in pieces], SlowNorm()
    host = make_host(Gated(1), speculated=128 * len(pieces), pieces=pieces, transfers=transfers)
    host.expect_step(RATES, 1.0)
    with host.without_speculation():
        submit_ones(host, *units)
    wait_until(lambda: bool(waited))
    assert (ordered, waited) == ([0, 1, 2, 3, 4], [2])  # two are left, with which the kernel goes on
    gate.set()
    wait_until(lambda: len(waited) == len(pieces))
    assert waited == [2, 1, 0, 5, 4, 3, 9, 8, 7, 6]
    transfers.computed.set()
    step(host)
    assert host.updates() == (128 * len(pieces),) * 2
    submit_ones(host, *units)
    step(host)
    assert waited[10:] == list(range(10, 20))
    host.close()


def test_room_for_some_is_given_to_the_deepest() -> None:
    log, transfers = EventLog(), SlowNorm()
    host = make_host(CpuAdam(1), speculated=200, transfers=transfers, log=log)
    assert host.state_bytes == (2 * 128 * 12, 128 * 12)
    host.expect_step(RATES, 1.0)
    submit_ones(host, "second", "first")
    wait_until(lambda: bool(log.of(What.SPECULATION_BEGUN)))
    transfers.computed.set()
    step(host)
    assert [event.unit for event in log.of(What.SPECULATION_BEGUN)] == ["second"]
    assert [event.unit for event in log.of(What.UPDATE_BEGUN)] == ["first"]
    host.close()


def test_what_goes_wrong_in_the_thread_is_told_to_who_waits() -> None:
    class Broken(CpuAdam):
        def order(self, *args: object, **kwargs: object) -> Callable[[], Done]:
            raise ZeroDivisionError("out of order")

    host = make_host(Broken(1))
    submit_ones(host, "first", "second")
    host.step(torch.tensor(0.5), RATES, 1.0)
    with pytest.raises(ZeroDivisionError, match="out of order"):
        host.wait("second")
    host.close()


def test_a_step_that_is_announced_while_the_last_one_ends_is_taken() -> None:
    """The loop goes on when the last bucket is settled, and may come round before the thread has noted the end."""
    announced = threading.Event()

    class HoldsUp(EventLog):
        def record(self, what: What, unit: str = "", start: int = 0, stop: int = 0) -> None:
            super().record(what, unit, start, stop)
            if what == What.STEP_TAKEN:
                assert announced.wait(10)

    log = HoldsUp()
    host = make_host(CpuAdam(1), log=log)
    for number in (1, 2):
        submit_ones(host, "second", "first")
        host.step(torch.tensor(0.5), RATES, 1.0)
        if number == 2:
            announced.set()
        wait_until(lambda number=number: len(log.of(*STEP_DONE)) == 2 * number)
        assert [len(log.of(What.UPDATED, unit=unit)) for unit in ("first", "second")] == [number, number]
    assert [host.steps_of(unit) for unit in ("first", "second")] == [2, 2]
    host.close()
