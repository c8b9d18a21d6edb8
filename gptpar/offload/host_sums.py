"""Sums of gradients over micro-batches in host memory, for devices that have no room for them.

Each micro-batch's gradient leaves the device in its own number format, through the ring of the transfers, and a thread
adds it to its bucket's sum in fp32 or wider. The additions are those of a sum on the device, in the same order, so no
bit of the sum changes. Meanwhile the device computes the next layers, or the next micro-batch.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gptpar.offload.bucket_state import ForbiddenEvent
from gptpar.offload.buckets import BUCKET_ELEMENTS, Bucket
from gptpar.offload.copying_transfers import MAX_UNITS_WAITING
from gptpar.offload.events import What
from gptpar.offload.shared_state import SharedState
from gptpar.offload.transfers import D2HCopy, DeviceEvent
from gptpar.optim.cpu_adam import order_sum
from gptpar.optim.elementwise import Done
from gptpar.system import pages

EXIT_SECONDS = 10.0

MAX_ORDERED = 3
"""Additions in the kernels' queue: while one runs, the thread waits for the next copies and for Python's lock."""


def sums_bytes(elements: float, itemsize: int) -> int:
    """Upper bound of the host memory (bytes) of :class:`HostSums`.

    Args:
        elements: of all sums together.
        itemsize: bytes of one of them.
    """
    return int(elements + min(elements, BUCKET_ELEMENTS)) * itemsize


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
        result: is final with this addend; ``None``: others follow.
        num_bytes: that it keeps on the device.
    """

    bucket: Bucket
    grad: D2HCopy
    old: torch.Tensor
    total: torch.Tensor
    result: SummedGradient | None
    num_bytes: int


class HostSums:
    """The sums of the CPU optimizer's buckets, and the thread that adds to them.

    The training loop submits addends, and the thread adds them in this order. Before a bucket's first addend of a step,
    the update with the last step's sum is done, because the unit's forward pass has waited for it.

    Args:
        shared: the CPU optimizer's state.
        dtype: of the sums.
        cores: the only ones on which the thread may run.

    Attributes:
        busy_s: seconds in which the kernel added.
    """

    def __init__(self, shared: SharedState, dtype: torch.dtype, cores: Sequence[int] | None):
        self._shared, self._cores = shared, cores
        self.busy_s = 0.0
        self._totals = {id(bucket): _zeros(bucket, dtype) for bucket in shared.buckets}
        self._nothing = _zeros(max(shared.buckets, key=_length), dtype)
        self._final: dict[str, list[SummedGradient]] = {}
        self._under_way: queue.SimpleQueue[_Addend | None] = queue.SimpleQueue()
        self._ordered: deque[tuple[_Addend, Callable[[], Done] | None]] = deque()
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
        shared, final = self._shared, []
        with self._changed:
            self._waiting_bytes += grad.nbytes
            self._max_bytes = max(self._max_bytes, MAX_UNITS_WAITING * grad.nbytes)
        with shared.changed:
            for bucket in shared.of_unit[unit]:
                if bucket.due:
                    raise ForbiddenEvent(What.SUBMITTED, unit, bucket.start, bucket.stop, "a step that is not done")
                part, total = grad[bucket.start : bucket.stop], self._totals[id(bucket)]
                old, result = self._nothing[: len(total)] if first else total, SummedGradient(total) if last else None
                self._under_way.put(_Addend(bucket, shared.transfers.fetch(part), old, total, result, part.nbytes))
                if result is not None:
                    final.append(result)
                    bucket.take(result)
                    shared.advance(bucket, What.SUBMITTED)
            shared.changed.notify_all()
        self._final[unit] = final
        self._hold_back()

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
        self._under_way.put(None)
        self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        try:
            if self._cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)
            self._shared.transfers.enter_thread()
        except BaseException as error:  # each addend's turn tells the training loop
            self._failure = error
        while self._take_next():
            pass

    def _take_next(self) -> bool:
        """Order the next addition, or finish the oldest one; false at the end."""
        if self._ordered and (len(self._ordered) == MAX_ORDERED or self._under_way.empty()):
            self._finish(*self._ordered.popleft())
            return True
        addend = self._under_way.get()
        if addend is not None:
            self._ordered.append((addend, self._order(addend)))
            return True
        while self._ordered:
            self._finish(*self._ordered.popleft())
        return False

    def _order(self, addend: _Addend) -> Callable[[], Done] | None:
        """Put an addition into the kernels' queue when the copy is there; ``None`` after an error."""
        done = None
        try:
            while self._ordered and not addend.grad.begin(urgent=False):
                self._finish(*self._ordered.popleft())  # its copy has the ring's last slot
            grad = addend.grad.tensor()  # after an error, too: the device may still read its memory
            addend.grad.forget_device()
            if self._failure is None:
                done = order_sum(addend.total, addend.old, grad, addend.bucket.kernel.threads)
        except BaseException as error:  # the training loop raises it when it waits
            self._failure = error
        with self._changed:
            self._waiting_bytes -= addend.num_bytes
            self._changed.notify_all()
        return done

    def _finish(self, addend: _Addend, done: Callable[[], Done] | None) -> None:
        bucket, square = addend.bucket, 0.0
        try:
            if done is not None:
                added = done()
                self.busy_s += added.end - added.begin
                if addend.result is not None:
                    square = sum(bucket.kernel.square(addend.total[start:stop]) for start, stop in bucket.counted)
        except BaseException as error:
            self._failure = error
        addend.grad.release()
        if addend.result is not None:
            addend.result.end(square, self._failure)


def _length(bucket: Bucket) -> int:
    return bucket.stop - bucket.start


def _zeros(bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
    return pages.zeros(_length(bucket) * dtype.itemsize).view(dtype)
