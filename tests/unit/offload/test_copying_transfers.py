"""Gradients that leave the device as soon as they are final: what is kept, what is given up, and who waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.graph import graph_obstacles
from gptpar.config.validate import find_problems, resolve
from gptpar.data.loader import MicroBatch
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.units import Unit
from gptpar.errors import ConfigError, GptparError
from gptpar.offload import buckets, build, copying_transfers, machine
from gptpar.offload.copying_transfers import (
    ALIGNMENT,
    MAX_UNITS_WAITING,
    CopiesUnderWay,
    CopyingSameMemory,
    GradientCopy,
    copying_bytes,
    max_bytes_waiting,
    slots_bytes,
)
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.transfers import OUTGOING, DeviceEvent
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done
from gptpar.optim.spans import GroupSpan, OffloadedPartition
from gptpar.plan.hardware import SUSTAINED
from gptpar.topology.groups import Topology
from gptpar.topology.layout import Layout
from gptpar.training.auto_gradients import available_memory, with_gradients
from gptpar.training.trainer import Trainer
from tests.helpers import TINY, make_trainer, random_tokens, tiny_config

ALL = "--cpu-optimizer --cpu-optimizer-ratio 1"
RATES = (AdamHyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0),)
UNITS = tuple(
    OffloadedPartition(name, 128, (GroupSpan(0, 128, 0),), ((0, 128),))
    for name in ("first", "second", "third", "fourth")
)


class Signal:
    """An event of a device that the test plays."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.asked = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self.asked.set()
        assert self._passed.wait(10)

    def pass_(self) -> None:
        self._passed.set()


class SlowCopies(CopyingSameMemory):
    """Gradients are made at once; each copy is there when the test says so."""

    def __init__(self, max_bytes: int):
        super().__init__(max_bytes)
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Signal]] = []

    def copy(self, grad: torch.Tensor, values: torch.Tensor) -> tuple[DeviceEvent, DeviceEvent]:
        made, there = Signal(), Signal()
        made.pass_()
        values.fill_(float("nan"))
        self.copies.append((grad, values, there))
        return made, there

    def let_arrive(self, number: int) -> None:
        grad, values, there = self.copies[number]
        values.copy_(grad)
        self.copies[number] = (torch.empty(0), values, there)
        there.pass_()


def make_share(
    transfers: CopyingSameMemory,
    speculated: int = 0,
    adam: CpuAdam | None = None,
    parameters: dict[str, torch.Tensor] | None = None,
) -> HostOptimizer:
    share = HostOptimizer(
        UNITS,
        parameters or {piece.unit: torch.zeros(128) for piece in UNITS},
        dtype=torch.float32,
        clip_grad=1.0,
        kernel=adam or CpuAdam(1),
        transfers=transfers,
        speculated_elements=speculated,
    )
    return share


def storage_alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """Asks later whether anything still refers to a tensor's memory."""
    reference = weakref.ref(tensor.untyped_storage())
    return lambda: reference() is not None


# --- one copy, and several ------------------------------------------------------------------------------------------


def test_a_copy_keeps_the_gradient_until_it_is_there_and_its_values_for_good() -> None:
    there, made = Signal(), Signal()
    grad, values = torch.ones(4), torch.zeros(4)
    copy, alive = GradientCopy(grad, values, made, there), storage_alive(grad)
    del grad
    assert not copy.made() and not copy.arrived() and alive() and copy.begin(urgent=False)
    made.pass_()
    copy.release()
    assert copy.made() and not copy.arrived() and alive()
    values.fill_(1.0)
    there.pass_()
    assert copy.arrived() and not alive()
    copy.release()  # a speculation is done with it, and may turn out wrong
    assert torch.equal(copy.tensor(), torch.ones(4)) and copy.tensor() is values


def test_reading_waits_for_the_copy_and_gives_up_the_gradient() -> None:
    there, made = Signal(), Signal()
    grad = torch.ones(4)
    copy, alive = GradientCopy(grad, torch.zeros(4), made, there), storage_alive(grad)
    del grad
    reader = threading.Thread(target=copy.tensor)
    reader.start()
    assert there.asked.wait(10) and alive()
    there.pass_()
    reader.join(10)
    assert not reader.is_alive() and not alive()


def test_only_what_is_above_the_bound_is_waited_for() -> None:
    under_way = CopiesUnderWay(max_bytes=2 * 16)
    signals = [Signal() for _ in range(4)]
    kept = []
    for signal in signals[:2]:
        grad = torch.ones(4)
        kept.append(storage_alive(grad))
        under_way.add(GradientCopy(grad, torch.zeros(4), Signal(), signal))
        del grad
        under_way.hold_back()  # returns
    under_way.add(GradientCopy(torch.ones(4), torch.zeros(4), Signal(), signals[2]))
    loop = threading.Thread(target=under_way.hold_back)
    loop.start()
    assert signals[0].asked.wait(10) and not signals[1].asked.is_set()
    assert kept[0]() and kept[1]()
    signals[0].pass_()
    loop.join(10)
    assert not loop.is_alive() and not signals[1].asked.is_set() and not kept[0]() and kept[1]()
    for signal in signals[1:]:
        signal.pass_()
    under_way.add(GradientCopy(torch.ones(4), torch.zeros(4), Signal(), signals[3]))
    under_way.hold_back()
    assert not kept[1]() and not signals[1].asked.is_set()  # what has arrived is forgotten without waiting


def test_the_bound_is_two_of_the_largest() -> None:
    assert max_bytes_waiting([3, 10, 7], 2) == MAX_UNITS_WAITING * 20
    outgoing = OUTGOING * buckets.BUCKET_ELEMENTS * 2
    assert copying_bytes(1000, 2) == 2000 + ALIGNMENT + outgoing
    full = buckets.BUCKET_ELEMENTS
    for lengths in ([1000], [full], [full, full], [full + 1, 64, 3 * full - 1], [64] * 50):
        locked = slots_bytes(lengths, 2) + outgoing
        assert locked <= copying_bytes(sum(lengths), 2, len(lengths)) <= locked + len(lengths) * ALIGNMENT


# --- with the host optimizer ----------------------------------------------------------------------------------------


def test_the_loop_waits_for_the_oldest_copy_without_the_thread_s_lock() -> None:
    """Of three units of 512 bytes two may wait; the updating thread goes on with what is there meanwhile."""
    transfers = SlowCopies(max_bytes=2 * 512)
    begun = threading.Event()

    class Noting(CpuAdam):
        def order(self, *args: Any, **kwargs: Any) -> Callable[[], Done]:
            begun.set()
            return super().order(*args, **kwargs)

    parameters = {piece.unit: torch.zeros(128) for piece in UNITS}
    share = make_share(transfers, 512, Noting(1), parameters)
    share.expect_step(RATES, 1.0)
    for unit in ("fourth", "third"):
        share.submit_gradient(unit, torch.full((128,), 1e-3))
    loop = threading.Thread(target=share.submit_gradient, args=("second", torch.full((128,), 1e-3)))
    loop.start()
    assert transfers.copies[0][2].asked.wait(10)
    transfers.let_arrive(1)
    share.expect_step(RATES, 1.0)  # takes the lock, and wakes the thread
    assert begun.wait(10) and loop.is_alive()
    transfers.let_arrive(0)
    loop.join(10)
    assert not loop.is_alive()
    transfers.let_arrive(2)
    share.submit_gradient("first", torch.full((128,), 1e-3))
    transfers.let_arrive(3)
    share.step(torch.tensor(0.5), RATES, 1.0)
    share.finish()
    assert share.num_ahead > 0 and share.num_redone == 0
    for values in parameters.values():
        torch.testing.assert_close(values, torch.full((128,), -0.1), rtol=1e-4, atol=0)
    share.close()


def test_a_clipped_step_finds_the_gradient_again_after_a_speculation_in_vain() -> None:
    transfers = SlowCopies(max_bytes=1 << 20)
    share = make_share(transfers, speculated=512)
    share.expect_step(RATES, 1.0)
    alive = []
    for number, piece in enumerate(reversed(UNITS)):
        grad = torch.full((128,), 3.0)
        alive.append(storage_alive(grad))
        share.submit_gradient(piece.unit, grad)
        del grad
        transfers.let_arrive(number)
    for _ in range(1000):
        if not any(left() for left in alive):
            break
        threading.Event().wait(0.01)
    assert not any(left() for left in alive)
    share.step(torch.tensor(30.0), RATES, 1.0)
    share.finish()
    assert share.num_redone == 1
    for _, _, moment in share.parts("exp_avg"):
        torch.testing.assert_close(moment, torch.full((128,), 0.1 * 3.0 / 30.0), rtol=1e-4, atol=0)
    share.close()


def test_each_bucket_s_gradient_lies_in_the_same_memory_in_every_step() -> None:
    transfers = SlowCopies(max_bytes=1 << 20)
    share = make_share(transfers)
    places = []
    for step in range(2):
        for number, piece in enumerate(reversed(UNITS)):
            share.submit_gradient(piece.unit, torch.full((128,), float(step)))
            transfers.let_arrive(4 * step + number)
        share.step(torch.tensor(0.5), RATES, 1.0)
        share.finish()
        places.append([values.data_ptr() for _, values, _ in transfers.copies[4 * step :]])
    assert places[0] == places[1] and len(set(places[0])) == 4
    share.close()


# --- with a whole run -----------------------------------------------------------------------------------------------


def train(flags: str, steps: int = 10) -> tuple[list[list[float]], dict[str, torch.Tensor], Trainer]:
    """(loss, norm, skipped) of each step, and the final weights and moments by name."""
    trainer = make_trainer(tiny_config(flags))
    seen = []
    for step in range(steps):
        tokens = random_tokens(2, 16, 60, seed=step)
        trainer.expect_step(2.0 * step)
        loss = trainer.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], step)
        launched = trainer.update(loss, iteration=step + 1, samples=2, progress=2.0 * step, stop=False)
        seen.append(launched.readings.read()[:3])
        if trainer.loss_scale.dynamic:
            trainer.loss_scale.update(bool(seen[-1][2]))
    state = {
        f"{kind} {name} {number}": part.clone()
        for kind, held in trainer.engine.optimizer.state_tensors().items()
        for name, parts in held.items()
        for number, (_, part) in enumerate(parts.parts)
    }
    trainer.close()
    return seen, state, trainer


@pytest.mark.parametrize("speculation", ["on", "off"])
@pytest.mark.parametrize("ratio", ["1", "0.731"])
@pytest.mark.parametrize("words", ["--bf16", "--fp64", "--fp16 --initial-loss-scale 1e6 --hysteresis 1"])
def test_gradients_that_leave_change_no_bit(
    words: str, ratio: str, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps are clipped, and in fp16 some skipped; buckets cut units."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 3333)
    words = f"{words} --clip-grad 1.2 --cpu-optimizer --cpu-optimizer-ratio {ratio} --offload-speculation {speculation}"
    stay, leave = train(f"{words} --offload-gradients off"), train(f"{words} --offload-gradients on")
    norms = [norm for _, norm, _ in stay[0]]
    assert any(norm > 1.2 for norm in norms) and any(norm < 1.2 for norm in norms)
    assert any(skipped for *_, skipped in stay[0]) == ("fp16" in words)
    assert str(stay[0]) == str(leave[0]) and stay[1].keys() == leave[1].keys()
    assert all(torch.equal(leave[1][name], values) for name, values in stay[1].items())


def test_parameters_may_be_on_the_host_as_well() -> None:
    stay, leave = (train(f"--bf16 {ALL} --cpu-parameters --offload-gradients {word}") for word in ("off", "on"))
    assert stay[0] == leave[0]
    assert all(torch.equal(leave[1][name], values) for name, values in stay[1].items())


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

    def submitting(share: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        assert formed is None
        submit(share, unit, grad)
        counts.append(sum(alive() for alive in sums))

    monkeypatch.setattr(GradientMemory, "sum_of", making)
    monkeypatch.setattr(HostOptimizer, "submit_gradient", submitting)
    _, _, trainer = train(f"--bf16 {ALL} --offload-gradients on", steps=2)
    units = len(trainer.engine.table.units)
    assert counts == [1] * (2 * units) and len(sums) == 2 * units
    assert not any(alive() for alive in sums)
    sums.clear()
    counts.clear()
    with monkeypatch.context() as patch:  # what this test would see if they stayed
        patch.setattr(copying_transfers.GradientCopy, "arrived", lambda copy: False)
        train(f"--bf16 {ALL} --offload-gradients on", steps=1)
    assert max(counts) > 1


def test_the_embedding_s_gradient_is_not_sent_early() -> None:
    """Its sum would stay on the device during the whole backward pass."""
    trainers = [make_trainer(tiny_config(f"{ALL} --offload-gradients {word}")) for word in ("off", "on")]
    assert [trainer._partial_gradient is None for trainer in trainers] == [False, True]
    for trainer in trainers:
        trainer.close()


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "world_size", "told"),
    [
        ("--offload-gradients on", 1, "--offload-gradients needs --cpu-optimizer."),
        (f"{ALL} --offload-gradients on", 2, "--offload-gradients on: 2 processes add up their gradients on the GPU"),
        (f"{ALL} --offload-gradients on --zero-stage 2", 2, "2 processes add up their gradients"),
        (
            f"{ALL} --offload-gradients on --global-batch-size 4",
            1,
            "a step of several micro-batches adds up their gradients",
        ),
        (f"{ALL} --offload-gradients on --cuda-graph on", 1, "--cuda-graph on: --offload-gradients on gives back"),
    ],
)
def test_what_cannot_be_is_told(flags: str, world_size: int, told: str) -> None:
    parsed = parse_flags([*TINY.split(), *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(parsed, world_size)
    assert told in str(caught.value)


def test_auto_is_decided_by_the_memory_that_is_free_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = f"--bf16 {ALL} --num-layers 12 --hidden-size 512"
    gpu, cpu = (Topology(Layout(), 0, torch.device(name)) for name in ("cuda", "cpu"))
    context = 1 << 29
    for memory, word in ((8 << 30, "off"), (2 << 30, "off"), (1 << 30, "on")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, memory=memory: (memory - context, memory))
        config, (told,) = with_gradients(tiny_config(wide), gpu)
        assert (told.name, told.value, config.offload.offload_gradients) == ("offload gradients", word, word)
        needed, there = told.reason.split(" are expected to be needed with all gradients on the GPU, and ")
        assert 1.5 < float(needed.split()[0]) < 1.8 and there == f"{memory >> 30}.00 GiB are available"
        for flags in ("--offload-gradients on", "--offload-gradients off", "--global-batch-size 4"):
            given = tiny_config(f"{wide} {flags}")
            assert with_gradients(given, gpu) == (given, [])
    given = tiny_config(wide)
    assert with_gradients(given, cpu) == (given, []) and not given.offload.gradients_leave_at_once


def test_other_processes_memory_is_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB 70 are in use: 2 are tensors of this process, what is expected of a context is its own, too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    assert available_memory(torch.device("cuda")) == (12 << 30) + SUSTAINED.outside


def test_auto_keeps_step_graphs_and_on_switches_them_off() -> None:
    for word, obstacles in (("auto", 0), ("off", 0), ("on", 1)):
        config = tiny_config(f"{ALL} --offload-gradients {word}")
        assert len(list(graph_obstacles(config, 1))) == obstacles and not find_problems(config, 1)


def test_the_room_for_speculation_counts_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes an element of state, 2 of gradients; what is left is for speculation."""
    elements = 10**8
    transfers = copying_bytes(elements, 2)
    monkeypatch.setattr(machine, "available_memory", lambda: round((18 * elements + transfers) / 0.9) + 100)
    config = tiny_config(f"--bf16 {ALL} --offload-gradients on")
    room = build._speculated_elements(config, elements, ADAMW.state_bytes(4), 0, transfers)
    assert room == pytest.approx(elements / 2, rel=1e-6)
    monkeypatch.setattr(machine, "available_memory", lambda: 12 * elements + transfers)
    with pytest.raises(GptparError, match="0.23 GiB for transfers"):
        build._speculated_elements(config, elements, ADAMW.state_bytes(4), 0, transfers)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "gptpar-cpu-adam"]
