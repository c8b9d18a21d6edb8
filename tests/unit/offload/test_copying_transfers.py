"""Gradients that leave the device as soon as they are final: what is kept, what is given up, and who waits."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.units import Unit
from gptpar.offload import buckets, copying_transfers
from gptpar.offload.copying_transfers import CopyingSameMemory
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.transfers import DeviceEvent
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import OffloadedPartition
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.host_optimizers import RATES, WHOLE, Point, make_host, step, wait_until
from tests.unit.offload.tiny_runs import ALL, OFFLOAD, assert_same_state, run_of

UNITS = tuple(OffloadedPartition(name, 128, *WHOLE) for name in ("first", "second", "third", "fourth"))


@dataclass
class SlowCopy:
    """A copy that is there when the test says so: of a gradient that is made at once."""

    grad: torch.Tensor
    alive: Callable[[], bool]
    values: torch.Tensor
    there: Point = field(default_factory=Point)

    def arrive(self) -> None:
        self.values.copy_(self.grad)
        self.there.set()


class SlowCopies(CopyingSameMemory):
    """Its copies are slow."""

    def __init__(self, max_bytes: int):
        super().__init__(max_bytes)
        self.copies: list[SlowCopy] = []

    def copy(self, grad: torch.Tensor, values: torch.Tensor) -> tuple[DeviceEvent, DeviceEvent]:
        made = Point()
        made.set()
        values.fill_(float("nan"))
        self.copies.append(SlowCopy(grad.clone(), storage_alive(grad), values))
        return made, self.copies[-1].there


def storage_alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """Asks later whether anything still refers to a tensor's memory."""
    reference = weakref.ref(tensor.untyped_storage())
    return lambda: reference() is not None


def test_the_loop_waits_for_the_oldest_copies_above_the_bound_without_the_thread_s_lock() -> None:
    """The device keeps a gradient until its copy is there; the updating thread goes on with what is there meanwhile."""
    transfers, log = SlowCopies(max_bytes=512), EventLog()  # of one unit
    parameters = {piece.unit: torch.zeros(128) for piece in UNITS}
    host = make_host(CpuAdam(1), speculated=512, pieces=UNITS, transfers=transfers, parameters=parameters, log=log)
    host.expect_step(RATES, 1.0)

    def submit() -> None:
        for piece in reversed(UNITS):
            host.submit_gradient(piece.unit, torch.full((128,), 1e-3))

    loop = threading.Thread(target=submit)
    loop.start()
    for number in range(3):
        wait_until(lambda number=number: len(transfers.copies) > number + 1)
        oldest, newest = transfers.copies[number:]
        assert oldest.there.asked.wait(10) and loop.is_alive() and len(transfers.copies) == number + 2
        assert oldest.alive() and newest.alive()
        if number:  # the thread has had the lock since the first one's arrival
            wait_until(lambda: bool(log.of(What.SPECULATION_BEGUN)))
        oldest.arrive()
        wait_until(lambda copy=oldest: not copy.alive())
    loop.join(10)
    assert not loop.is_alive()
    transfers.copies[-1].arrive()
    step(host)
    assert host.num_ahead > 0 and host.num_redone == 0
    for values in parameters.values():
        torch.testing.assert_close(values, torch.full((128,), -0.1), rtol=1e-4, atol=0)
    host.close()


FP16 = "--fp16 --initial-loss-scale 1e6 --hysteresis 1"


@pytest.mark.parametrize(
    ("words", "ratio", "speculation", "count", "share"),
    [
        ("--bf16", "1", "on", 1, "1"),
        pytest.param("--bf16", "0.731", "off", 1, "1", marks=pytest.mark.slow),
        pytest.param("--fp64", "1", "off", 1, "1", marks=pytest.mark.slow),
        pytest.param(FP16, "0.731", "on", 1, "1", marks=pytest.mark.slow),
        ("--bf16", "1", "on", 4, "0.5"),
        pytest.param("--bf16", "0.731", "off", 4, "1", marks=pytest.mark.slow),
        pytest.param("--fp64", "1", "off", 4, "1", marks=pytest.mark.slow),
        pytest.param("--fp64", "0.731", "on", 4, "0.3", marks=pytest.mark.slow),
        pytest.param(FP16, "1", "on", 4, "1", marks=pytest.mark.slow),
        pytest.param(FP16, "0.731", "off", 4, "0.5", marks=pytest.mark.slow),
    ],
)
def test_gradients_that_leave_change_no_bit(
    words: str, ratio: str, speculation: str, count: int, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do sums over micro-batches on the host, in every pair of values; but their norm is summed in another order.

    Some steps are clipped where the norm is the same, and in fp16 some skipped; buckets cut units.
    """
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 3333)
    clip = 0.9 if count == 1 else 0
    words = f"{words} --clip-grad {clip} {OFFLOAD} {ratio} --offload-speculation {speculation} --offload-gradients"
    stay, leave = (run_of(f"{words} {word}", 7, count) for word in ("off", f"on --offload-gradients-ratio {share}"))
    assert stay.skips_some() == ("fp16" in words) and (not clip or stay.clips_some(clip))
    assert (leave.losses, leave.skipped) == (stay.losses, stay.skipped)
    assert leave.norms == pytest.approx(stay.norms, rel=1e-15 if "fp64" in words else 1e-7, nan_ok=True)
    assert_same_state(leave, stay)


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
