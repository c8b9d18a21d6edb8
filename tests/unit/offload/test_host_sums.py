"""Sums of gradients over micro-batches in host memory: the same bits as on the device, bounded waiting, errors."""

import threading

import pytest
import torch

from gptpar.offload.copying_transfers import MAX_UNITS_WAITING
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.host_sums import LAYERS_AHEAD, HostSums
from gptpar.offload.transfers import D2HCopy, DeviceEvent, SameMemory, StagingBuffer
from gptpar.optim.cpu_adam import CpuAdam, order_sum
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition
from tests.pairs import every_pair
from tests.unit.offload.host_optimizers import (
    RATES,
    FarBehind,
    Made,
    Point,
    make_host,
    step,
    wait_for_speculation,
    wait_until,
)
from tests.unit.offload.tiny_runs import ALL, run_of

UNITS = tuple(OffloadedPartition(name, 128, (GroupRange(0, 128, 0),), ((0, 100),)) for name in ("first", "second"))


@every_pair(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    wide=[torch.float32, torch.float64],
    length=[1, 63, 1000, 70_001],
)
def test_a_sum_by_the_kernel_is_torch_s(dtype: torch.dtype, wide: torch.dtype, length: int) -> None:
    old, addend = torch.randn(length, dtype=wide), torch.randn(length).to(dtype)
    old[-1:], addend[-1:] = 1e-41, 0.0  # denormal
    wanted, total = old + addend.to(wide), torch.empty_like(old)
    order_sum(total, old, addend, 2)()
    assert torch.equal(total, wanted)
    order_sum(old, old, addend, 2)()
    assert torch.equal(old, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "lion", "muon"])
def test_clipped_steps_are_those_of_sums_on_the_device(optimizer: str) -> None:
    words = f"--fp64 --clip-grad 1.2 {ALL} --offload-speculation on --optimizer {optimizer} --offload-gradients"
    stay, leave = (run_of(f"{words} {word}", 6, count=4) for word in ("off", "on --offload-gradients-ratio 0.4"))
    assert stay.clips_some(1.2)
    torch.testing.assert_close(torch.tensor(leave.steps), torch.tensor(stay.steps), rtol=1e-12, atol=0)
    torch.testing.assert_close(leave.state, stay.state, rtol=1e-11, atol=1e-12)


def make_sums(
    transfers: SameMemory, speculated: int = 0, parameters: dict[str, torch.Tensor] | None = None
) -> HostOptimizer:
    units = [piece.unit for piece in UNITS]
    return make_host(
        CpuAdam(1), speculated=speculated, pieces=UNITS, parameters=parameters, transfers=transfers, sums=units
    )


def sums_of(host: HostOptimizer) -> HostSums:
    assert isinstance(host.sums, HostSums)
    return host.sums


def submit(host: HostOptimizer, value: float, *, first: bool = False, last: bool = False) -> None:
    for piece in reversed(UNITS):
        sums_of(host).add(piece.unit, torch.full((128,), value), first=first, last=last)


@pytest.mark.parametrize("speculated", [0, 256])
def test_a_step_begins_anew_and_another_may_have_one_addend(speculated: int) -> None:
    parameters = {piece.unit: torch.zeros(128) for piece in UNITS}
    host = make_sums(SameMemory(), speculated, parameters)
    for values in ([0.01, 0.02, 0.04], [0.5], [0.25, 0.25]):
        host.expect_step(RATES, 1.0)
        for number, value in enumerate(values):
            submit(host, value, first=number == 0, last=number == len(values) - 1)
        total = torch.tensor(values).sum()
        assert all(torch.equal(grad, total.expand(128)) for _, _, grad in host.parts("grad"))
        assert sums_of(host).squares() == pytest.approx({piece.unit: 100 * float(total) ** 2 for piece in UNITS})
        wait_for_speculation(host)
        step(host)
    assert host.steps_taken == 3 and (host.num_ahead > 0) == (speculated > 0)
    assert all(torch.equal(part, parameters[unit][:128]) for unit, _, part in host.parts("weights"))
    host.close()


def test_copies_begin_when_the_device_is_ready_and_the_loop_waits_for_all_but_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that waits for the device could fill the driver's queue, and the loop's next launch would wait with it.

    Units whose copies are not done keep the device's memory.
    """
    transfers, begun = FarBehind(), list[tuple[str, bool]]()

    def begin(self: Made, *, urgent: bool) -> bool:
        begun.append((threading.current_thread().name, self.is_made.is_set()))
        return True

    monkeypatch.setattr(Made, "begin", begin)
    host = make_sums(transfers)
    loop = threading.Thread(target=lambda: [submit(host, 1.0, first=one, last=not one) for one in (True, False)])
    loop.start()
    for number in range(4):
        fetched = min(4, number + MAX_UNITS_WAITING + 1)
        wait_until(lambda fetched=fetched: len(transfers.copies) == fetched)
        wait_until(lambda number=number: transfers.copies[number].looks > 1)
        assert len(transfers.copies) == fetched and len(begun) == number
        transfers.copies[number].is_made.set()
        wait_until(lambda number=number: len(begun) == number + 1)
    loop.join(60)
    assert not loop.is_alive() and set(begun) == {("gptpar-gradient-sums", True)}
    assert sums_of(host).squares() == pytest.approx({piece.unit: 400.0 for piece in UNITS})
    host.close()


@pytest.mark.parametrize("where", ["made", "begin", "arrived", "tensor"])
def test_an_error_of_the_device_ends_the_loop_s_waiting(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    transfers = FarBehind()
    host = make_sums(transfers)
    submit(host, 1.0, first=True)
    monkeypatch.setattr(Made, where, fails)
    raised = list[BaseException]()

    def loop() -> None:
        try:
            submit(host, 1.0, last=True)
            sums_of(host).squares()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    for copy in transfers.copies:
        copy.is_made.set()
    thread.join(60)
    assert [str(error) for error in raised] == ["an illegal memory access was encountered"]
    for copy in transfers.copies:
        copy.is_made.set()
    host.close()
    assert "gptpar-gradient-sums" not in {one.name for one in threading.enumerate()}


def test_the_loop_does_not_launch_more_than_some_layers_ahead_of_the_device() -> None:
    points: list[Point] = []

    class Late(SameMemory):
        def now(self) -> DeviceEvent:
            points.append(Point())
            return points[-1]

    host = make_sums(Late())
    sums = sums_of(host)
    loop = threading.Thread(target=lambda: [sums.keep_pace() for _ in range(LAYERS_AHEAD + 3)])
    loop.start()
    for number in range(3):
        wait_until(lambda number=number: len(points) == LAYERS_AHEAD + number + 1)
        assert loop.is_alive()
        points[number].set()
    loop.join(60)
    assert not loop.is_alive()
    host.close()


def test_additions_give_back_the_only_slot_of_a_ring() -> None:
    """The thread has several additions in the kernels' queue, but none of them keeps the next copy from beginning."""

    owners: list[D2HCopy] = []

    class OneSlot(SameMemory):
        def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
            copy = super().fetch(grad, made)

            def begin(*, urgent: bool) -> bool:
                if not owners:
                    owners.append(copy)
                return copy in owners

            def tensor() -> torch.Tensor:
                assert begin(urgent=True)
                return grad

            replaced = {"begin": begin, "tensor": tensor, "release": owners.clear}
            for name, method in replaced.items():
                setattr(copy, name, method)
            return copy

    host = make_sums(OneSlot())
    for value in (1.0, 2.0, 4.0):
        submit(host, value, first=value == 1.0, last=value == 4.0)
    assert sums_of(host).squares() == pytest.approx({piece.unit: 100 * 49.0 for piece in UNITS})
    host.close()
