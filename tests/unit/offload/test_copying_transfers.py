"""Gradients that leave the device as soon as they are final: what is kept, what is given up, and who waits."""

import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.units import Unit
from gptpar.offload import buckets, copying_transfers
from gptpar.offload.copying_transfers import CopiesUnderWay, CopyingSameMemory, GradientCopy
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.transfers import DeviceEvent
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import OffloadedPartition
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.host_optimizers import RATES, WHOLE, Point, make_host, step, wait_until
from tests.unit.offload.tiny_runs import ALL, OFFLOAD, assert_same, run_of

UNITS = tuple(OffloadedPartition(name, 128, *WHOLE) for name in ("first", "second", "third", "fourth"))


class SlowCopies(CopyingSameMemory):
    """Gradients are made at once; each copy is there when the test says so."""

    def __init__(self, max_bytes: int):
        super().__init__(max_bytes)
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Point]] = []

    def copy(self, grad: torch.Tensor, values: torch.Tensor) -> tuple[DeviceEvent, DeviceEvent]:
        made, there = Point(), Point()
        made.set()
        values.fill_(float("nan"))
        self.copies.append((grad, values, there))
        return made, there

    def let_arrive(self, number: int) -> None:
        grad, values, there = self.copies[number]
        values.copy_(grad)
        self.copies[number] = (torch.empty(0), values, there)
        there.set()


def storage_alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """Asks later whether anything still refers to a tensor's memory."""
    reference = weakref.ref(tensor.untyped_storage())
    return lambda: reference() is not None


# --- one copy, and several ------------------------------------------------------------------------------------------


def test_a_copy_keeps_the_gradient_until_it_is_there_and_its_values_for_good() -> None:
    there, made = Point(), Point()
    grad, values = torch.ones(4), torch.zeros(4)
    copy, alive = GradientCopy(grad, values, made, there), storage_alive(grad)
    del grad
    assert not copy.made() and not copy.arrived() and alive() and copy.begin(urgent=False)
    made.set()
    copy.release()
    assert copy.made() and not copy.arrived() and alive()
    values.fill_(1.0)
    there.set()
    assert copy.arrived() and not alive()
    copy.release()  # a speculation is done with it, and may turn out wrong
    assert torch.equal(copy.tensor(), torch.ones(4)) and copy.tensor() is values


def test_only_what_is_above_the_bound_is_waited_for() -> None:
    under_way = CopiesUnderWay(max_bytes=2 * 16)
    signals = [Point() for _ in range(4)]
    kept = []
    for signal in signals[:2]:
        grad = torch.ones(4)
        kept.append(storage_alive(grad))
        under_way.add(GradientCopy(grad, torch.zeros(4), Point(), signal))
        del grad
        under_way.hold_back()  # returns
    under_way.add(GradientCopy(torch.ones(4), torch.zeros(4), Point(), signals[2]))
    loop = threading.Thread(target=under_way.hold_back)
    loop.start()
    assert signals[0].asked.wait(10) and not signals[1].asked.is_set()
    assert kept[0]() and kept[1]()
    signals[0].set()
    loop.join(10)
    assert not loop.is_alive() and not signals[1].asked.is_set() and not kept[0]() and kept[1]()
    for signal in signals[1:]:
        signal.set()
    under_way.add(GradientCopy(torch.ones(4), torch.zeros(4), Point(), signals[3]))
    under_way.hold_back()
    assert not kept[1]() and not signals[1].asked.is_set()  # what has arrived is forgotten without waiting


# --- with the host optimizer ----------------------------------------------------------------------------------------


def test_the_loop_waits_for_the_oldest_copy_without_the_thread_s_lock() -> None:
    """None of four units may wait on the device; the updating thread goes on with what is there meanwhile."""
    transfers, log = SlowCopies(max_bytes=0), EventLog()
    parameters = {piece.unit: torch.zeros(128) for piece in UNITS}
    host = make_host(CpuAdam(1), speculated=512, pieces=UNITS, transfers=transfers, parameters=parameters, log=log)
    host.expect_step(RATES, 1.0)

    def submit() -> None:
        for piece in reversed(UNITS):
            host.submit_gradient(piece.unit, torch.full((128,), 1e-3))

    loop = threading.Thread(target=submit)
    loop.start()
    for number in range(len(UNITS)):
        wait_until(lambda number=number: len(transfers.copies) > number)
        assert transfers.copies[number][2].asked.wait(10) and loop.is_alive()
        if number:  # the thread has had the lock since the first one's arrival
            wait_until(lambda: bool(log.of(What.SPECULATION_BEGUN)))
        transfers.let_arrive(number)
    loop.join(10)
    step(host)
    assert host.num_ahead > 0 and host.num_redone == 0
    for values in parameters.values():
        torch.testing.assert_close(values, torch.full((128,), -0.1), rtol=1e-4, atol=0)
    host.close()


# --- with a whole run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ratio", "speculation"),
    [
        ("--bf16", "1", "on"),
        pytest.param("--bf16", "0.731", "off", marks=pytest.mark.slow),
        pytest.param("--fp64", "1", "off", marks=pytest.mark.slow),
        pytest.param("--fp16 --initial-loss-scale 1e6 --hysteresis 1", "0.731", "on", marks=pytest.mark.slow),
    ],
)
def test_gradients_that_leave_change_no_bit(
    words: str, ratio: str, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps are clipped, and in fp16 some skipped; buckets cut units."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 3333)
    words = f"{words} --clip-grad 0.9 {OFFLOAD} {ratio} --offload-speculation {speculation} --offload-gradients"
    stay, leave = (run_of(f"{words} {word}", steps=8, count=1) for word in ("off", "on"))
    assert stay.clips_some(0.9) and stay.skips_some() == ("fp16" in words)
    assert_same(leave, stay)


def test_no_gradient_outlives_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each submission the sums of all units before have been given up; the last one when its update has read it."""
    sums: list[Callable[[], bool]] = []
    counts: list[int] = []
    make, submit = GradientMemory.sum_of, HostOptimizer.submit_gradient

    def making(memory: GradientMemory, unit: Unit) -> torch.Tensor:
        num_sums = len(memory.tensors)
        total = make(memory, unit)
        if len(memory.tensors) > num_sums:
            sums.append(storage_alive(total))
        return total

    def submitting(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        assert formed is None
        submit(host, unit, grad)
        counts.append(sum(alive() for alive in sums))

    monkeypatch.setattr(GradientMemory, "sum_of", making)
    monkeypatch.setattr(HostOptimizer, "submit_gradient", submitting)
    words = f"--bf16 {ALL} --offload-gradients on"
    units = len(run_of(words, steps=2, count=1).trainer.engine.table.units)
    assert counts == [1] * (2 * units) and len(sums) == 2 * units
    assert not any(alive() for alive in sums)
    sums.clear()
    counts.clear()
    with monkeypatch.context() as patch:  # what this test would see if they stayed
        patch.setattr(copying_transfers.GradientCopy, "arrived", lambda copy: False)
        run_of(words, steps=1, count=1)
    assert max(counts) > 1


def test_the_embedding_s_gradient_is_not_sent_early() -> None:
    """Its sum would stay on the device during the whole backward pass."""
    trainers = [make_trainer(tiny_config(f"{ALL} --offload-gradients {word}")) for word in ("off", "on")]
    assert [trainer._partial_gradient is None for trainer in trainers] == [False, True]
    for trainer in trainers:
        trainer.close()
