"""A host optimizer alone, and kernels and transfers that are slow."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch

from gptpar.offload.events import EventLog
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.next_action import speculable
from gptpar.offload.transfers import D2HCopy, DeviceEvent, PendingScalar, SameMemory, StagingBuffer, Transfers
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.elementwise import HostKernel
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition

WHOLE = (GroupRange(0, 128, 0),), ((0, 128),)
RATES = (AdamHyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0),)
TWO_PIECES = (OffloadedPartition("first", 128, *WHOLE), OffloadedPartition("second", 128, *WHOLE))


def make_host(
    kernel: HostKernel,
    *,
    speculated: int = 0,
    pieces: Sequence[OffloadedPartition] = TWO_PIECES,
    parameters: Mapping[str, torch.Tensor] | None = None,
    partial_unit: str | None = None,
    transfers: Transfers | None = None,
    log: EventLog | None = None,
    clip_grad: float = 1.0,
    sums: Sequence[str] | None = None,
) -> HostOptimizer:
    return HostOptimizer(
        pieces,
        parameters or {piece.unit: torch.zeros(piece.length) for piece in pieces},
        dtype=torch.float32,
        clip_grad=clip_grad,
        kernels=[kernel] * (1 + max(one.group for piece in pieces for one in piece.group_ranges)),
        transfers=transfers or SameMemory(),
        speculated_elements=speculated,
        partial_unit=partial_unit,
        log=log,
        sums=sums,
    )


def submit_ones(host: HostOptimizer, *units: str) -> None:
    for unit in units:
        host.submit_gradient(unit, torch.ones(128))


def step(host: HostOptimizer, norm: float = 0.5) -> None:
    """Request a step and wait for its end."""
    host.step(torch.tensor(norm), RATES, 1.0)
    host.finish()


def wait_until(condition: Callable[[], bool]) -> None:
    """For at most a minute."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("what is waited for has not happened within a minute")


def wait_for_speculation(host: HostOptimizer) -> None:
    """Return when the thread has speculated with all gradients that it may speculate with."""
    shared = host.shared

    def has() -> bool:
        if shared.expected is None or shared.forbids_speculation:
            return True
        return not any(bucket.grad is not None and bucket.grad.arrived() for bucket in speculable(shared.buckets))

    wait_until(has)


class Point(threading.Event):
    """A point of the device's work, which a test lets the device pass by ``set()``.

    Attributes:
        asked: somebody has waited for it.
    """

    query = threading.Event.is_set

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def synchronize(self) -> None:
        self.asked.set()
        assert self.wait(10)


class SlowNorm(SameMemory):
    """The norm is not known before :attr:`computed`."""

    def __init__(self) -> None:
        self.computed = threading.Event()

    def read_scalar(self, number: torch.Tensor) -> PendingScalar:
        def value() -> float:
            assert self.computed.wait(10)
            return number.item()

        return cast(PendingScalar, SimpleNamespace(known=self.computed.is_set, value=value))


@dataclass
class Made:
    """A gradient that the device has computed or not, and how often anybody has looked."""

    values: torch.Tensor
    is_made: Point
    looks: int = 0

    def made(self) -> bool:
        self.looks += 1
        return self.is_made.is_set()

    def next_point(self) -> DeviceEvent | None:
        return None if self.made() else self.is_made

    def begin(self, *, urgent: bool) -> bool:
        return True

    def arrived(self) -> bool:
        return self.made()

    def tensor(self) -> torch.Tensor:
        assert self.is_made.wait(10)
        return self.values.clone()

    def forget_device(self) -> None: ...

    def release(self) -> None: ...


class FarBehind(SlowNorm):
    """The device computes what it is told to much later: a test sets :attr:`Made.is_made` of each of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Made] = []

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        self.copies.append(Made(grad.clone(), Point()))
        return self.copies[-1]
