"""Decides where the layers are cut into the virtual stages of a pipeline: pure arithmetic.

A partition is a list of boundaries: part k holds layers ``bounds[k] .. bounds[k + 1] - 1``. In an interleaved pipeline
there are more parts than stages: stage r runs parts r, r + num_stages, r + 2 num_stages, ...
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from gptpar.errors import ConfigError


def balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """The boundaries that minimise the weight of the heaviest part, exactly.

    Ties are broken in this order: the smallest sum of squared weights of the parts, the smallest sum of squared numbers
    of layers, more layers in the later parts (early stages keep more micro-batches in memory).

    Args:
        weights: one number per layer, not negative.
        num_parts: number of parts, each of at least one layer.

    Raises:
        ConfigError: there are fewer layers than parts, or a weight is negative or not finite.
    """
    _check_enough_layers(len(weights), num_parts)
    prefix = _exact_prefix(weights)
    return _most_even(prefix, num_parts, _lightest_limit(prefix, num_parts))


def balanced_interleaved(weights: Sequence[float], num_parts: int, num_stages: int) -> list[int]:
    """Boundaries for an interleaved pipeline: minimises the heaviest stage first, then the heaviest part.

    Local search: the result may not be optimal. It starts from the exact answer for the parts, and from parts with
    equal numbers of layers, and shifts groups of neighbouring boundaries as long as that helps. In about 95 % of small
    random cases it found the lightest possible heaviest stage; in the others the heaviest stage was at most 1.25 times
    as heavy.

    Args:
        weights: one number per layer, not negative.
        num_parts: number of stages times virtual stages per stage.
        num_stages: number of stages.

    Raises:
        ConfigError: as for :func:`balanced`, or the parts are no multiple of the stages.
    """
    _check_enough_layers(len(weights), num_parts)
    if num_stages < 1 or num_parts % num_stages:
        raise ConfigError([f"{num_parts} parts cannot be dealt evenly to {num_stages} stages: use a multiple."])
    start = balanced(weights, num_parts)
    if num_parts == num_stages:
        return start
    prefix = _exact_prefix(weights)

    def even_stages(dealt: _Dealt) -> tuple[float, ...]:
        return max(dealt.stages), _squares(dealt.stages)

    def even_parts(dealt: _Dealt) -> tuple[float, ...]:
        parts = [prefix[b] - prefix[a] for a, b in pairwise(dealt.bounds)]
        sizes = _squares(b - a for a, b in pairwise(dealt.bounds))
        return max(dealt.stages), max(parts), _squares(dealt.stages), _squares(parts), sizes

    exact = [b - a for a, b in pairwise(prefix)]
    starts = (_Dealt(b, balance(exact, b, num_stages)) for b in (start, uniform(len(weights), num_parts)))
    return min((_descend(prefix, _descend(prefix, s, even_stages), even_parts) for s in starts), key=even_parts).bounds


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """Boundaries of parts with equal numbers of layers; the first parts get the remaining layers, one each.

    Raises:
        ConfigError: there are fewer layers than parts.
    """
    _check_enough_layers(num_layers, num_parts)
    each, rest = divmod(num_layers, num_parts)
    return [part * each + min(part, rest) for part in range(num_parts + 1)]


def partition(
    method: str | Sequence[int],
    num_parts: int,
    *,
    parameters: Sequence[int],
    flops: Sequence[float],
    kinds: Sequence[str],
    num_stages: int | None = None,
) -> list[int]:
    """Boundaries, by the method that a user names.

    Args:
        method: ``parameters`` or ``flops`` (balance these), ``uniform`` (number of layers), ``type:REGEX`` (balance the
            number of layers whose class name matches the regular expression, in upper or lower case), or the
            boundaries themselves, as ``0,7,14`` or as a sequence of numbers.
        num_parts: number of parts.
        parameters: number of parameters of every layer.
        flops: floating-point operations of every layer.
        kinds: class name of every layer.
        num_stages: number of stages that the parts are dealt to in turn; without it every part is a stage.

    Returns:
        ``num_parts + 1`` boundaries, the first 0 and the last the number of layers.

    Raises:
        ConfigError: the method is unknown or cannot be followed.
    """
    if not isinstance(method, str):
        return _explicit(list(method), num_parts, len(kinds))
    name, _, pattern = method.strip().partition(":")
    if re.fullmatch(r"[-+\d,\s]+", name) and not pattern:
        return _explicit(_numbers(name), num_parts, len(kinds))
    match name.lower():
        case "uniform" if not pattern:
            return uniform(len(kinds), num_parts)
        case "parameters" if not pattern:
            weights: Sequence[float] = parameters
        case "flops" if not pattern:
            weights = flops
        case "type" if pattern:
            weights = _matches(pattern, kinds)
        case _:
            raise ConfigError(
                [f"partition method {method!r} is unknown: use parameters, flops, uniform, type:REGEX or 0,7,14."]
            )
    return balanced_interleaved(weights, num_parts, num_parts if num_stages is None else num_stages)


def balance(weights: Sequence[float], bounds: Sequence[int], num_stages: int) -> list[float]:
    """Each stage's load: the sum of its parts' weights.

    Args:
        weights: one number per layer.
        bounds: boundaries of the parts.
        num_stages: number of stages that the parts are dealt to in turn.
    """
    parts = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    return [sum(parts[stage::num_stages]) for stage in range(num_stages)]


def _check_enough_layers(num_layers: int, num_parts: int) -> None:
    if num_parts < 1:
        raise ConfigError([f"a model cannot be cut into {num_parts} parts: use at least 1."])
    if num_parts > num_layers:
        raise ConfigError(
            [
                f"{num_layers} layers cannot fill {num_parts} pipeline parts: use fewer stages or virtual stages, or "
                "more layers."
            ]
        )


def _exact_prefix(weights: Sequence[float]) -> list[int]:
    """Running sums of the weights as integer multiples of a common unit, so that comparisons are exact."""
    wrong = [f"layer {i} has weight {w}: weights are finite and not negative." for i, w in enumerate(weights) if w < 0]
    wrong += [f"layer {i} has weight {w}, no number." for i, w in enumerate(weights) if not math.isfinite(w)]
    if wrong:
        raise ConfigError(wrong)
    exact = [Fraction(w) for w in weights]
    unit = math.lcm(*(w.denominator for w in exact))
    return [0, *accumulate(int(w * unit) for w in exact)]


def _reach(prefix: list[int], limit: int, num_parts: int) -> list[int]:
    """Entry k: the largest number of leading layers that k parts of weight at most ``limit`` can hold."""
    reach = [0]
    for _ in range(num_parts):
        reach.append(bisect_right(prefix, prefix[reach[-1]] + limit) - 1)
    return reach


def _lightest_limit(prefix: list[int], num_parts: int) -> int:
    """The smallest limit with which ``num_parts`` parts can hold all layers, by bisection over integers."""
    high = prefix[-1]
    low = max(-(-high // num_parts), *(b - a for a, b in pairwise(prefix)))
    while low < high:
        middle = (low + high) // 2
        if _reach(prefix, middle, num_parts)[-1] == len(prefix) - 1:
            high = middle
        else:
            low = middle + 1
    return high


def _most_even(prefix: list[int], num_parts: int, limit: int) -> list[int]:
    """The most even partition without a part above ``limit``, by dynamic programming over the parts."""
    num_layers = len(prefix) - 1
    ahead = _reach(prefix, limit, num_parts)
    behind = _reach([prefix[-1] - x for x in reversed(prefix)], limit, num_parts)
    costs, all_cuts = {0: 0}, []
    for part in range(1, num_parts + 1):
        rest = num_parts - part
        ends = range(max(part, num_layers - behind[rest]), min(ahead[part], num_layers - rest) + 1)
        costs, cuts = _add_part(prefix, limit, costs, ends)
        all_cuts.append(cuts)
    bounds = [num_layers]
    for cuts in reversed(all_cuts):
        bounds.append(cuts[bounds[-1]])
    return bounds[::-1]


def _add_part(
    prefix: list[int], limit: int, costs: dict[int, int], ends: range
) -> tuple[dict[int, int], dict[int, int]]:
    """Add one part: for each of its possible ends, the least cost of all parts so far, and the start with this cost.

    A part costs its squared weight and, to break ties, its squared number of layers. Both costs are convex, so a later
    end never has an earlier best start (quadrangle inequality): each answer halves the search for the others.
    """
    per_weight = len(prefix) ** 2  # more than all squared numbers of layers together
    totals: dict[int, int] = {}
    cuts: dict[int, int] = {}
    jobs = [(ends.start, ends.stop, min(costs), max(costs))]
    while jobs:
        first, stop, low, high = jobs.pop()
        if first >= stop:
            continue
        end = (first + stop) // 2
        lightest_start = bisect_left(prefix, prefix[end] - limit)
        starts = range(max(low, lightest_start), min(high, end - 1) + 1)
        totals[end], cuts[end] = min(
            (costs[start] + per_weight * (prefix[end] - prefix[start]) ** 2 + (end - start) ** 2, start)
            for start in starts
        )
        jobs += [(first, end, low, cuts[end]), (end + 1, stop, cuts[end], high)]
    return totals, cuts


class _Dealt(NamedTuple):
    """A partition whose parts are dealt to stages in turn, and the weight of each stage."""

    bounds: list[int]
    stages: list[float]


def _squares(numbers: Iterable[float]) -> float:
    return sum(number * number for number in numbers)


def _descend(prefix: list[int], at: _Dealt, cost: Callable[[_Dealt], tuple[float, ...]]) -> _Dealt:
    """Move to the best neighbour as long as it is better.

    Args:
        cost: its first number is the weight of the heaviest stage.
    """
    least = cost(at)
    while True:
        neighbours = ((cost(neighbour), neighbour) for neighbour in _neighbours(prefix, at, least[0]))
        found, neighbour = min(neighbours, default=(least, at))
        if found >= least:
            return at
        at, least = neighbour, found


def _neighbours(prefix: list[int], at: _Dealt, limit: float) -> Iterator[_Dealt]:
    """Neighbours shift consecutive boundaries by the same number of layers; the heaviest stage stays within ``limit``.

    The parts between shifted boundaries keep their sizes, so layers move from any part to any other. Shifts by more
    than one layer cross layers without weight.
    """
    bounds, num_stages = at.bounds, len(at.stages)
    longest = max(b - a for a, b in pairwise(bounds))
    for first in range(1, len(bounds) - 1):
        for step in chain(range(bounds[first - 1] - bounds[first] + 1, 0), range(1, longest)):
            stages = list(at.stages)
            for last in range(first, len(bounds) - 1):
                shifted = bounds[last] + step
                if shifted >= bounds[-1]:
                    break
                weight = prefix[shifted] - prefix[bounds[last]]  # from one part to the part before it
                stages[(last - 1) % num_stages] += weight
                stages[last % num_stages] -= weight
                if shifted < bounds[last + 1] and max(stages) <= limit:
                    moved = [*bounds[:first], *(b + step for b in bounds[first : last + 1]), *bounds[last + 1 :]]
                    yield _Dealt(moved, list(stages))


def _matches(pattern: str, kinds: Sequence[str]) -> list[int]:
    try:
        found = [int(bool(re.search(pattern, kind, re.IGNORECASE))) for kind in kinds]
    except re.error as error:
        raise ConfigError([f"partition method type:{pattern} is no regular expression: {error}."]) from error
    if not any(found):
        names = ", ".join(sorted(set(kinds)))
        raise ConfigError([f"partition method type:{pattern} matches none of {len(kinds)} layers, which are {names}."])
    return found


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError([f"partition boundaries {text!r} are no list of whole numbers such as 0,7,14."]) from error


def _explicit(bounds: list[int], num_parts: int, num_layers: int) -> list[int]:
    """Check boundaries given by the user, and return them."""
    text = ",".join(map(str, bounds))
    wrong = []
    if len(bounds) != num_parts + 1:
        wrong.append(f"{num_parts} parts need {num_parts + 1} partition boundaries, but {text} has {len(bounds)}.")
    if bounds[:1] != [0]:
        wrong.append(f"partition boundaries {text} must start at 0.")
    if bounds[-1:] != [num_layers]:
        wrong.append(f"partition boundaries {text} must end at {num_layers}, the number of layers.")
    if any(a >= b for a, b in pairwise(bounds)):
        wrong.append(f"partition boundaries {text} must increase: every part has at least one layer.")
    if wrong:
        raise ConfigError(wrong)
    return bounds
