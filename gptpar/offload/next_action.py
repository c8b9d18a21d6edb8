"""What the updating thread does next, decided from the table of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import takewhile

from gptpar.offload.bucket_state import SPECULABLE, BucketState
from gptpar.offload.buckets import Bucket

NEAR = 4
"""Buckets whose gradients are copied to the host ahead of the one at work, whatever else is there."""


class Action(Enum):
    """What there is to do."""

    TAKE_STEP = auto()
    SPECULATE = auto()
    FINISH_UPDATE = auto()
    """Wait for the kernel, and send what it has computed."""
    WAKE = auto()
    """Wake the kernel's threads: there will be work in a moment."""
    WAIT = auto()
    END = auto()


def next_action(
    candidates: Sequence[Bucket], *, step_known: bool, on_its_way: bool, at_work: bool, ending: bool
) -> tuple[Action, Bucket | None]:
    """What to do, and with which bucket where that is to speculate.

    The bucket is the one that the next forward pass needs first, of those whose gradients have arrived; not of those
    that were submitted: the host runs far ahead of the device, and that one may be long in coming.

    Args:
        candidates: buckets that may be speculated, in forward order.
        step_known: whether a step is requested whose norm is known, or need not be waited for.
        on_its_way: whether a candidate's gradient is being copied to the host.
        at_work: whether the kernel has an update that was not sent yet.
        ending: whether the thread is to end, with no step requested.
    """
    if step_known:
        return Action.TAKE_STEP, None
    if not ending:
        for bucket in candidates:
            if bucket.grad is not None and bucket.grad.arrived():
                return Action.SPECULATE, bucket
    if at_work:
        return Action.FINISH_UPDATE, None
    if ending:
        return Action.END, None
    return (Action.WAKE if on_its_way else Action.WAIT), None


def speculable(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those that have a double buffer, and a gradient to speculate with."""
    return [bucket for bucket in buckets if bucket.state in SPECULABLE and bucket.double_buffer is not None]


def late_partials(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those whose partial gradient was not used before the device had computed the final one."""
    waiting = BucketState.PARTIAL_AND_FINAL
    return [b for b in buckets if b.state is waiting and b.newer is not None and b.newer.made()]


def begin_copies(buckets: Sequence[Bucket]) -> bool:
    """Begin the D2H copies of what is needed first; where the ring is full, what is needed last makes room.

    Gradients arrive last layer first. If those that came early kept the ring, the thread would work on them, and leave
    for the end of the step what the next forward pass begins with. Only partial gradients come with the last layers, or
    before, and belong to the other end.

    Args:
        buckets: in forward order.

    Returns:
        Whether the first gradient that the device has computed is being copied.
    """
    coming = [bucket.grad for bucket in buckets if bucket.grad is not None]
    first = list(takewhile(lambda grad: grad.made(), coming))
    last = takewhile(lambda grad: grad.made(), reversed(coming[len(first) :]))  # those before are not computed either
    made = first + list(last)[::-1]
    near, later = made[:NEAR], made[NEAR:]
    begun = []
    for grad in near:
        while not (has_room := grad.begin(urgent=False)) and later:
            later.pop().release()
        begun.append(has_room)
    return bool(begun) and begun[0]
