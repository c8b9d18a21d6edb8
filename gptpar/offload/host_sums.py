"""Sums of gradients over micro-batches in host memory, for devices that have no room for them.

Each micro-batch's gradient leaves the device in its own number format, through the ring of the transfers, and a thread
adds it to its bucket's sum in fp32 or wider. The additions are those of a sum on the device, in the same order, so no
bit of the sum changes. Meanwhile the device computes the next layers, or the next micro-batch: the ring holds a third
of the gradients, so the additions may go on in the next forward pass. The thread begins the copies as well, each when
its gradient is computed: behind unfinished work, the driver queues some 50 copies, and then blocks whoever begins one.

An addend goes through five queues, in order. The training loop puts it into the first, and only the thread takes it on:

``_submitted``  the device may still compute it
``_computed``   the thread has taken it: it waits for the gradient, in order, or for a slot of the ring
``_leaving``    its copy has begun
``_here``       it is in host memory, and the device's memory is free
``_ordered``    its addition is in the kernels' queue; at the end, its slot is given back
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gptpar.offload.buckets import BUCKET_ELEMENTS, Bucket
from gptpar.offload.copying_transfers import MAX_UNITS_WAITING
from gptpar.offload.events import What
from gptpar.offload.gpu_transfers import summed_ring_bytes
from gptpar.offload.shared_state import SharedState
from gptpar.offload.transfers import D2HCopy, DeviceEvent
from gptpar.optim.cpu_adam import order_square, order_sum
from gptpar.optim.elementwise import Done
from gptpar.system import pages

EXIT_SECONDS = 10.0

SLOT_SECONDS = 1e-4
"""Pause while the device computes the next gradient, or the updating thread has the ring's last slots."""

LAYERS_AHEAD = 4
"""Forward passes of layers that the training loop may have launched before the device is done with them. The driver's
queue holds about a thousand launches. While it was full, the driver answered no other thread: no copy began, and the
additions stood still for most of a forward pass."""

MAX_ORDERED = 8
"""Additions in the kernels' queue: while one runs, the thread waits for the next copies and for Python's lock."""


def sums_bytes(elements: float, itemsize: int, grad_itemsize: int) -> int:
    """Upper bound of the host memory (bytes) of :class:`HostSums` and of the ring through which its gradients come.

    Args:
        elements: of all sums together.
        itemsize: bytes of one of them.
        grad_itemsize: bytes of an element of a micro-batch's gradient.
    """
    return int(elements + min(elements, BUCKET_ELEMENTS)) * itemsize + summed_ring_bytes(elements * grad_itemsize)


class SummedGradient:
    """A bucket's sum. To the bucket's update, it is a gradient that arrives with the last micro-batch's addition.

    Args:
        values: [n] the memory of the sum.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._is_final = values, threading.Event()
        self._square = 0.0
        self._failure: BaseException | None = None

    def end(self, square: float = 0.0, failure: BaseException | None = None) -> None:
        """The sum is final, or an error has ended the additions."""
        self._square, self._failure = square, failure
        self._is_final.set()

    def square(self) -> float:
        """Wait for the sum; returns the sum of squares of the elements that this process counts."""
        self.tensor()
        return self._square

    def query(self) -> bool:
        return self._is_final.is_set()

    def synchronize(self) -> None:
        self._is_final.wait()

    def made(self) -> bool:
        return self.query()

    def begin(self, *, urgent: bool) -> bool:
        return True

    def arrived(self) -> bool:
        return self.query()

    def next_point(self) -> DeviceEvent | None:
        return self

    def tensor(self) -> torch.Tensor:
        self._is_final.wait()
        if self._failure is not None:
            raise self._failure
        return self._values

    def forget_device(self) -> None:
        """Does nothing: the sum is in host memory."""

    def release(self) -> None:
        """Does nothing: the sum stays until the next step's first addend."""


@dataclass(frozen=True)
class _Addend:
    """A micro-batch's gradient on its way to its bucket's sum.

    Attributes:
        old: [n] what it is added to.
        result: the sum that is final with this addend; ``None``: other addends follow.
        num_bytes: bytes of the device that it keeps.
    """

    bucket: Bucket
    grad: D2HCopy
    old: torch.Tensor
    total: torch.Tensor
    result: SummedGradient | None
    num_bytes: int


class _Ordered(NamedTuple):
    """An addend's work in the kernels' queue; a call of a field waits for its result.

    Attributes:
        added: the addition.
        squares: the sum of squares of each range of the total that this process counts, if no addend follows.
    """

    added: Callable[[], Done]
    squares: Sequence[Callable[[], float]]


class HostSums:
    """The sums of some units' buckets, and the thread that adds to them.

    The training loop submits addends, and the thread adds them in this order. Before a bucket's first addend of a step,
    the update with the last step's sum is done, because the unit's forward pass has waited for it.

    Args:
        shared: the CPU optimizer's state.
        dtype: of the sums.
        cores: the only ones on which the thread may run.
        units: whose gradients are added up here.

    Attributes:
        busy_s: seconds in which the kernel added.
    """

    def __init__(self, shared: SharedState, dtype: torch.dtype, cores: Sequence[int] | None, units: Collection[str]):
        self._shared, self._cores = shared, cores
        self.busy_s = 0.0
        buckets = [bucket for bucket in shared.buckets if bucket.unit in units]
        self._totals = {id(bucket): _zeros(bucket, dtype) for bucket in buckets}
        nothing = pages.zeros(max(map(_length, buckets), default=0) * dtype.itemsize).view(dtype)
        self._nothing = {length: nothing[:length] for length in set(map(_length, buckets))}
        self._final: dict[str, list[SummedGradient]] = {}
        self._submitted: queue.SimpleQueue[_Addend | None] = queue.SimpleQueue()
        self._computed: deque[_Addend] = deque()
        self._leaving: deque[_Addend] = deque()
        self._here: deque[_Addend] = deque()
        self._ordered: deque[tuple[_Addend, _Ordered | None]] = deque()
        self._launched: deque[DeviceEvent] = deque()
        self._changed = threading.Condition()
        self._waiting_bytes, self._max_bytes = 0, 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gptpar-gradient-sums", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # Python ends threads amid C++ functions, which may abort the process

    def add(self, unit: str, grad: torch.Tensor, *, first: bool, last: bool) -> None:
        """See :class:`~gptpar.engine.subscriber.HostGradientSums`.

        Raises:
            ForbiddenEvent: the unit's last step is not done.
            BaseException: the error that ended the additions.
        """
        shared, made, final = self._shared, self._shared.transfers.now(), []
        with self._changed:
            self._waiting_bytes += grad.nbytes
            self._max_bytes = max(self._max_bytes, MAX_UNITS_WAITING * grad.nbytes)
        with shared.changed:
            for bucket, part in shared.parts(unit, grad):
                total = self._totals[id(bucket)]
                old, result = self._nothing[len(total)] if first else total, SummedGradient(total) if last else None
                grad_copy = shared.transfers.later(part, made)
                self._submitted.put(_Addend(bucket, grad_copy, old, total, result, part.nbytes))
                if result is not None:
                    final.append(result)
                    bucket.take(result)
                    shared.advance(bucket, What.SUBMITTED)
            shared.changed.notify_all()
        self._final[unit] = final
        self._hold_back()

    def keep_pace(self) -> None:
        """See :class:`~gptpar.engine.subscriber.HostGradientSums`."""
        self._launched.append(self._shared.transfers.now())
        if len(self._launched) > LAYERS_AHEAD:
            self._launched.popleft().synchronize()

    def squares(self) -> dict[str, float]:
        """See :class:`~gptpar.engine.subscriber.HostGradientSums`."""
        return {unit: sum(result.square() for result in final) for unit, final in self._final.items()}

    def _hold_back(self) -> None:
        """Wait while addends keep too much of the device's memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._waiting_bytes <= self._max_bytes)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread, before the transfers are closed."""
        atexit.unregister(self.close)
        self._submitted.put(None)
        self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        try:
            if self._cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)
            self._shared.transfers.enter_thread()
        except BaseException as error:  # each addend's turn tells the training loop
            self._failure = error
        is_open = True
        while is_open or self._is_busy():
            while is_open and not (self._is_busy() and self._submitted.empty()):
                addend = self._submitted.get()
                is_open = addend is not None
                if addend is not None:
                    self._computed.append(addend)
            self._take_next()

    def _is_busy(self) -> bool:
        """Whether the thread has taken on an addend that is not added yet."""
        return any((self._computed, self._leaving, self._here, self._ordered))

    def _take_next(self) -> None:
        """Begin copies, give up the device's memory of finished ones, and order the next addition or finish one."""
        while self._computed and self._begins(self._computed[0], urgent=False):
            self._leaving.append(self._computed.popleft())
        while self._leaving and self._has_arrived(self._leaving[0]):
            self._arrive(self._leaving.popleft())
        if self._ordered and (len(self._ordered) == MAX_ORDERED or not (self._here or self._leaving)):
            self._finish(*self._ordered.popleft())
        elif self._here:
            addend = self._here.popleft()
            self._ordered.append((addend, self._order(addend)))
        elif self._leaving:
            self._arrive(self._leaving.popleft())
        elif self._computed and self._begins(self._computed[0], urgent=True):
            self._leaving.append(self._computed.popleft())
        elif self._computed:
            time.sleep(SLOT_SECONDS)

    def _begins(self, addend: _Addend, *, urgent: bool) -> bool:
        """Begin a gradient's copy if the device has computed it; False: not yet, or the ring has no slot for it.

        After an error nothing is waited for: the result is True.

        Args:
            urgent: whether it may take the ring's last slots.
        """
        try:
            if self._shared.failure is not None:
                raise self._shared.failure
            return self._failure is not None or (addend.grad.made() and addend.grad.begin(urgent=urgent))
        except BaseException as error:
            self._fail(error)
            return True

    def _has_arrived(self, addend: _Addend) -> bool:
        """Whether a gradient is in host memory; True after an error, too."""
        try:
            return addend.grad.arrived()
        except BaseException as error:
            self._fail(error)
            return True

    def _fail(self, error: BaseException) -> None:
        """Keep an error for the training loop, which raises it where it waits."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _arrive(self, addend: _Addend) -> None:
        """Wait until a gradient is in host memory; then the device's memory is free."""
        try:
            addend.grad.tensor()  # after an error, too: the device may still read its memory
            addend.grad.forget_device()
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._waiting_bytes -= addend.num_bytes
            self._changed.notify_all()
        self._here.append(addend)

    def _order(self, addend: _Addend) -> _Ordered | None:
        """Put an addition into the kernels' queue, and behind a sum's last one its squares; ``None`` after an error."""
        total, threads = addend.total, addend.bucket.kernel.threads
        counted = addend.bucket.counted if addend.result is not None else ()
        try:
            if self._failure is None:
                added = order_sum(total, addend.old, addend.grad.tensor(), threads)
                return _Ordered(added, [order_square(total[start:stop], threads) for start, stop in counted])
        except BaseException as error:
            self._failure = error
        return None

    def _finish(self, addend: _Addend, ordered: _Ordered | None) -> None:
        square = 0.0
        try:
            if ordered is not None:
                try:
                    added = ordered.added()
                    self.busy_s += added.end - added.begin
                finally:  # also after an error: the queue still writes to memory that these functions own
                    square = sum([one() for one in ordered.squares])
        except BaseException as error:
            self._failure = error
        addend.grad.release()
        if addend.result is not None:
            addend.result.end(square, self._failure)


def _length(bucket: Bucket) -> int:
    return bucket.stop - bucket.start


def _zeros(bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
    return pages.zeros(_length(bucket) * dtype.itemsize).view(dtype)
