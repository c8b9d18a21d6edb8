"""Searches the best layout: judges every candidate of the space by memory and time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gptpar.config import Flags
from gptpar.errors import ConfigError
from gptpar.plan.planner import Plan, Planner
from gptpar.plan.space.candidate import UNCHANGED, Candidate, Option
from gptpar.plan.space.dimensions import CPU_OPTIMIZER
from gptpar.plan.space.spaces import rounds, to_predict


@dataclass
class Search:
    """The result of a search.

    Attributes:
        on_host: what all layouts have in host memory, in words.
        accepted: plans that fit, fastest first.
        refused: reason -> (number of layouts, an example).
        tried: number of layouts that were judged.
    """

    on_host: tuple[str, ...]
    accepted: list[Plan] = field(default_factory=list)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    tried: int = 0


def search(planner: Planner) -> Search:
    """Judge all candidates, in rounds (:func:`~gptpar.plan.space.spaces.rounds`) until some fit.

    Returns:
        The result of the last round.
    """
    for common in rounds(planner.typed, planner.given, planner.world_size):
        found = _judged(planner, common)
        if found.accepted:
            break
    found.accepted.sort(key=lambda plan: (-plan.tokens_per_second, plan.need))
    return found


def candidates(planner: Planner, common: Option = UNCHANGED) -> Iterator[Candidate]:
    """All layouts that a search judges, with the changes of ``common``."""
    nodes = planner.cluster.gpus_per_node
    return to_predict(planner.typed, planner.given, planner.world_size, nodes, common)


def _judged(planner: Planner, common: Sequence[Option]) -> Search:
    """The judgement of all candidates with each of the changes in ``common``, the least first."""
    result = Search(_on_host(planner.typed, common[0]))
    nearest = float("inf")
    for candidate in chain.from_iterable(candidates(planner, option) for option in common):
        result.tried += 1
        try:
            plan = planner.plan(candidate.changes)
            shortage = plan.shortage()
        except ConfigError as error:
            _refuse(result, _reason(error.problems[0]), f"{candidate.name}: {error.problems[0]}")
            continue
        if len(common) > 1 and candidate.changes.get(CPU_OPTIMIZER) and not plan.on_host:
            _refuse(result, "fits without the CPU optimizer", candidate.name)
            continue
        if not shortage:
            result.accepted.append(plan)
            continue
        reason = "does not fit into a GPU's memory" if not plan.fits_gpu else "does not fit into the host's memory"
        closest = plan.need < nearest
        nearest = min(nearest, plan.need)
        _refuse(result, reason, f"{candidate.name}: {shortage}", better=closest)
    return result


def _on_host(typed: Flags, offload: Option) -> tuple[str, ...]:
    """Words for what these changes to the command line put into host memory."""
    wanted = typed.with_values(offload.changes).offload
    moved = {"the optimizer": wanted.cpu_optimizer, "the parameters": wanted.cpu_parameters}
    return tuple(words for words, is_moved in moved.items() if is_moved)


def _refuse(result: Search, reason: str, example: str, *, better: bool = False) -> None:
    count, before = result.refused.get(reason, (0, example))
    result.refused[reason] = (count + 1, example if better else before)


def _reason(problem: str) -> str:
    """The reason behind a problem: the first flag that it names, or the problem without its numbers."""
    flags = re.findall(r"--[a-z][\w-]*", problem)
    return f"{flags[0]} does not allow it" if flags else re.sub(r"\d[\d,.]*", "N", problem)
