"""Decides the updating thread's next action from the buckets' states, and when it speculates."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import takewhile

from gptpar.offload.bucket_state import SPECULABLE, BucketState
from gptpar.offload.buckets import Bucket
from gptpar.offload.host_sums import SummedGradient
from gptpar.offload.transfers import DeviceEvent

NEAR = 4
"""How many of the first gradients in forward order may evict later ones from the ring."""


class Action(Enum):
    """An action of the updating thread."""

    TAKE_STEP = auto()
    SPECULATE = auto()
    FINISH_UPDATE = auto()
    """Wait for the kernel, and send the new parameters."""
    TAKE_BACK = auto()
    """Undo the speculation in the device's parameters."""
    WAKE = auto()
    """Wake the kernel's threads, then wait: there will be work in a moment."""
    WAIT = auto()
    END = auto()


def next_action(
    candidates: Sequence[Bucket], *, step_known: bool, on_its_way: bool, at_work: bool, taking_back: bool, ending: bool
) -> tuple[Action, Bucket | None]:
    """The next action, and its bucket if the action is to speculate.

    The bucket is the first in forward order whose gradient is in host memory. A submitted gradient does not count until
    then: the host runs far ahead of the device, which may not compute that gradient for a long time.

    Args:
        candidates: buckets that may be speculated, in forward order.
        step_known: whether a step is requested, and either its norm is known or there is nothing left to speculate.
        on_its_way: whether the gradient of a candidate is being copied to the host.
        at_work: whether the kernel has an update whose result was not sent yet.
        taking_back: whether the training loop waits for the parameters of the last step.
        ending: whether the thread is to end, and no step is requested.
    """
    if step_known:
        return Action.TAKE_STEP, None
    if not ending:
        for bucket in candidates:
            if bucket.grad is not None and bucket.grad.arrived():
                return Action.SPECULATE, bucket
    if at_work:
        return Action.FINISH_UPDATE, None
    if taking_back:
        return Action.TAKE_BACK, None
    if ending:
        return Action.END, None
    return (Action.WAKE if on_its_way else Action.WAIT), None


def speculable(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets that have a double buffer and a gradient to speculate with."""
    return [bucket for bucket in buckets if bucket.state in SPECULABLE and bucket.double_buffer is not None]


def next_arrival(buckets: Sequence[Bucket]) -> DeviceEvent | None:
    """The next point of the device's work at which a gradient is computed, or in host memory; ``None``: unknown.

    The order is that of the device: partial gradients, then the final ones of the last layer to the first.

    Args:
        buckets: in forward order, none of whose gradients is in host memory.
    """
    early = [bucket.grad for bucket in buckets if bucket.grad is not None and bucket.partial is not None]
    final = [bucket.grad for bucket in reversed(buckets) if bucket.grad is not None and bucket.partial is None]
    points = (grad.next_point() for grad in early + final)
    return next((point for point in points if point is not None), None)


def late_partials(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets whose partial gradient is unused although the device has computed the final one."""
    waiting = BucketState.PARTIAL_AND_FINAL
    return [b for b in buckets if b.state is waiting and b.newer is not None and b.newer.made()]


def begin_copies(buckets: Sequence[Bucket]) -> bool:
    """Begin the D2H copies of the gradients that are needed first; if the ring is full, the last ones make room.

    The backward pass produces the last layer's gradient first, but the next forward pass needs the first layer's
    parameters first. If early gradients kept the ring, the thread would update the last layers and leave the first
    layers for the end of the step. (A partial gradient is an exception: it comes early and belongs to the first layer.)

    Args:
        buckets: in forward order.

    Returns:
        Whether the first computed gradient in forward order is being copied.
    """
    gradients = (bucket.grad for bucket in buckets if bucket.grad is not None)
    coming = [grad for grad in gradients if not isinstance(grad, SummedGradient) or grad.made()]
    first = list(takewhile(lambda grad: grad.made(), coming))
    # The backward pass goes from last to first: before a gradient that is not computed, none is.
    last = takewhile(lambda grad: grad.made(), reversed(coming[len(first) :]))
    made = first + list(last)[::-1]
    near, later = made[:NEAR], made[NEAR:]
    begun = []
    for grad in near:
        while not (has_room := grad.begin(urgent=False)) and later:
            later.pop().release()
        begun.append(has_room)
    return bool(begun) and begun[0]
