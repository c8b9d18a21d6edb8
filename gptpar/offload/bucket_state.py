"""The states of a bucket during a step, and the events that change them.

The training loop submits gradients and requests the step. The updating thread causes all other events::

    IDLE -> FINAL -> UPDATING -> IDLE                                 without speculation
    IDLE -> FINAL -> SPECULATED -> IDLE                               the speculation was right: committed
    IDLE -> FINAL -> SPECULATED -> UPDATING -> IDLE                   it was wrong: updated again from the old state
    IDLE -> PARTIAL -> SPECULATED_PARTIAL
         -> SPECULATED_AND_FINAL -> COMPLETING -> IDLE                a gradient that was submitted before it was final
    PARTIAL -> PARTIAL_AND_FINAL -> FINAL                             it was final before anything was speculated
    FINAL -> REPLACED -> UPDATING                                     a second gradient: it may be replaced again
    SPECULATED -> STALE -> UPDATING                                   a second gradient, after a speculation
    SPECULATED -> FINAL -> UPDATING                                   taken back: somebody reads before the step
    FINAL -> AVERAGING -> AVERAGED -> DIRECTED -> UPDATING -> IDLE    an update of matrices, in two phases

A skipped step leads to IDLE from every state that the training loop can cause before the step. Parameters speculated
with a final gradient are sent to the device at once. Parameters speculated with a partial gradient wait in the bucket's
own host memory (``own_copy``) until the commit, because the training loop still computes with the old ones.
"""

from __future__ import annotations

from enum import StrEnum

from gptpar.offload.events import What


class BucketState(StrEnum):
    """How far a bucket is in the coming step."""

    IDLE = "no gradient yet"
    PARTIAL = "a partial gradient"
    PARTIAL_AND_FINAL = "a partial gradient, and the final one"
    FINAL = "the final gradient"
    REPLACED = "a gradient in place of an earlier one"
    SPECULATED_PARTIAL = "speculated, but for the open ranges of a partial gradient"
    SPECULATED_AND_FINAL = "speculated, but for the open ranges, whose final gradient is submitted"
    SPECULATED = "speculated"
    STALE = "speculated with a gradient that was replaced"
    COMPLETING = "open ranges being computed in the double buffer"
    AVERAGING = "the momentum being updated"
    AVERAGED = "the momentum updated, no direction yet"
    DIRECTED = "the momentum updated, and a direction"
    UPDATING = "being updated in place"


_S, _W = BucketState, What

SPECULABLE = frozenset({_S.PARTIAL, _S.PARTIAL_AND_FINAL, _S.FINAL})
"""The bucket has an unused gradient that will not change, at least outside of known ranges. ``REPLACED`` is missing: a
gradient that was replaced once may be replaced again."""

HOLDS_SPECULATION = frozenset({_S.SPECULATED_PARTIAL, _S.SPECULATED_AND_FINAL, _S.SPECULATED, _S.STALE})
"""The double buffer holds a speculated state, right or wrong; the device's parameters may already have its values."""

SPECULATED_WITH_FINAL = frozenset({_S.SPECULATED_AND_FINAL, _S.SPECULATED, _S.STALE})
"""States of ``HOLDS_SPECULATION`` whose final gradient is submitted; only these may have reached the device's
parameters."""

HAS_FINAL = frozenset({_S.PARTIAL_AND_FINAL, _S.FINAL, _S.REPLACED, _S.SPECULATED_AND_FINAL, _S.SPECULATED, _S.STALE})
"""A step may be requested."""

_AT_REST = (_S.IDLE, _S.PARTIAL, _S.SPECULATED_PARTIAL, *HAS_FINAL)

TRANSITIONS: dict[tuple[BucketState, What], BucketState] = {
    (_S.IDLE, _W.SUBMITTED_PARTIAL): _S.PARTIAL,
    (_S.IDLE, _W.SUBMITTED): _S.FINAL,
    (_S.PARTIAL, _W.SUBMITTED): _S.PARTIAL_AND_FINAL,
    (_S.FINAL, _W.SUBMITTED): _S.REPLACED,
    (_S.REPLACED, _W.SUBMITTED): _S.REPLACED,
    (_S.SPECULATED_PARTIAL, _W.SUBMITTED): _S.SPECULATED_AND_FINAL,
    (_S.SPECULATED, _W.SUBMITTED): _S.STALE,
    (_S.STALE, _W.SUBMITTED): _S.STALE,
    # The open ranges were those of the gradient that is replaced.
    (_S.PARTIAL_AND_FINAL, _W.SUBMITTED): _S.REPLACED,
    (_S.SPECULATED_AND_FINAL, _W.SUBMITTED): _S.STALE,
    (_S.PARTIAL_AND_FINAL, _W.PARTIAL_DROPPED): _S.FINAL,
    (_S.PARTIAL, _W.SPECULATION_BEGUN): _S.SPECULATED_PARTIAL,
    (_S.PARTIAL_AND_FINAL, _W.SPECULATION_BEGUN): _S.SPECULATED_AND_FINAL,
    (_S.FINAL, _W.SPECULATION_BEGUN): _S.SPECULATED,
    (_S.SPECULATED, _W.TAKEN_BACK): _S.FINAL,
    (_S.SPECULATED_AND_FINAL, _W.TAKEN_BACK): _S.FINAL,
    (_S.STALE, _W.TAKEN_BACK): _S.REPLACED,
    **{(state, _W.UPDATE_BEGUN): _S.UPDATING for state in HAS_FINAL},
    (_S.FINAL, _W.AVERAGE_BEGUN): _S.AVERAGING,
    (_S.REPLACED, _W.AVERAGE_BEGUN): _S.AVERAGING,
    (_S.AVERAGING, _W.AVERAGED): _S.AVERAGED,
    (_S.AVERAGED, _W.DIRECTED): _S.DIRECTED,
    (_S.DIRECTED, _W.UPDATE_BEGUN): _S.UPDATING,
    (_S.UPDATING, _W.UPDATED): _S.IDLE,
    (_S.SPECULATED_AND_FINAL, _W.COMPLETION_BEGUN): _S.COMPLETING,
    (_S.COMPLETING, _W.COMMITTED): _S.IDLE,
    (_S.SPECULATED_AND_FINAL, _W.COMMITTED): _S.IDLE,
    (_S.SPECULATED, _W.COMMITTED): _S.IDLE,
    **{(state, _W.SKIPPED): _S.IDLE for state in _AT_REST},
}


class ForbiddenEvent(RuntimeError):
    """An event that the bucket's state does not allow: a fault of the program, not of its user."""

    def __init__(self, what: What, unit: str, start: int, stop: int, state: str):
        super().__init__(f"'{what}' cannot follow where elements {start} to {stop} of {unit} have '{state}'")


def event_of_step(state: BucketState, same_numbers: bool, has_open_ranges: bool) -> What:
    """The next event of a bucket in a step that is taken: ``COMMITTED``, ``COMPLETION_BEGUN`` or ``UPDATE_BEGUN``.

    Args:
        same_numbers: whether the step's hyperparameters are those of the speculation.
        has_open_ranges: whether the speculation left out ranges of a partial gradient.
    """
    if same_numbers and state == BucketState.SPECULATED:
        return What.COMMITTED
    if same_numbers and state == BucketState.SPECULATED_AND_FINAL:
        return What.COMPLETION_BEGUN if has_open_ranges else What.COMMITTED
    return What.UPDATE_BEGUN
