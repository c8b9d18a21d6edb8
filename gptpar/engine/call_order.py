"""Plans the prefetch: which layers' parameters are brought while another layer runs. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(frozen=True)
class CallOrder:
    """Which layers are started while a layer runs, and which ones stay.

    Attributes:
        following: the layers to start in a layer's forward pass, the next one first.
        previous: the layer to start in a layer's backward pass, and the lookups before that one.
        last: layers that stay after their forward pass.
        lookups: layers whose backward pass reads none of their parameters.
    """

    following: Mapping[str, Sequence[str]] = field(default_factory=dict)
    previous: Mapping[str, Sequence[str]] = field(default_factory=dict)
    last: Collection[str] = frozenset()
    lookups: Collection[str] = frozenset()


def call_order(
    orders: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    stays: Collection[str] = (),
    lookups: Collection[str] = (),
) -> CallOrder:
    """The order of these calls.

    Args:
        orders: for each virtual stage, its layers in the order of calls. The last layer's parameters stay after its
            forward pass, because its backward pass follows at once.
        sizes: layer -> bytes of its parameters.
        stays: more layers whose parameters stay.
        lookups: see :class:`CallOrder`.
    """
    following: dict[str, Sequence[str]] = {}
    previous: dict[str, Sequence[str]] = {}
    for names in orders:
        most = max((sizes[name] for name in names[1:] if name != names[0] and name not in stays), default=0)
        for number, name in enumerate(names):
            following.setdefault(name, _ahead(names[number + 1 :], sizes, most))
            before = names[:number][::-1]
            previous[name] = [*before[:1], *takewhile(lambda one: one in lookups, before[1:])]
    last = {names[-1] for names in orders if names} | set(stays)
    return CallOrder(following, previous, frozenset(last), frozenset(lookups))


def _ahead(names: Sequence[str], sizes: Mapping[str, int], most: int) -> Sequence[str]:
    """The first of these layers that together have ``most`` bytes: those of the largest layer brought during a pass.

    The LM head is as large as several blocks, so its transfer takes longer than one block runs. Bringing it early does
    not raise the peak: the loss needs more memory later, for the head's gradient has the same size.
    """
    count = 1
    while count < len(names) and sum(sizes[name] for name in names[:count]) < most:
        count += 1
    return names[:count]
