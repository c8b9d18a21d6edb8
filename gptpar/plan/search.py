"""Searches the best layout: judges every candidate of the space by memory and time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gptpar.config import Flags
from gptpar.errors import ConfigError
from gptpar.plan.planner import Plan, Planner
from gptpar.plan.space.candidate import UNCHANGED, Candidate, Option, with_changes
from gptpar.plan.space.spaces import offloads, to_predict


@dataclass
class Search:
    """What a search has found.

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
    """Judge all candidates. If none fits, judge all again with more and more in host memory, which is slower.

    Returns:
        The result of the last round.
    """
    for offload in offloads(planner.given):
        found = _judged(planner, offload)
        if found.accepted:
            break
    found.accepted.sort(key=lambda plan: (plan.time.total, plan.need))
    return found


def candidates(planner: Planner, offload: Option = UNCHANGED) -> Iterator[Candidate]:
    """All layouts that a search judges, with the changes of ``offload``."""
    nodes = planner.cluster.gpus_per_node
    return to_predict(planner.typed, planner.given, planner.world_size, nodes, offload)


def _judged(planner: Planner, offload: Option) -> Search:
    """The judgement of all candidates with the changes of ``offload``."""
    result = Search(_on_host(planner.typed, offload))
    nearest = float("inf")
    for candidate in candidates(planner, offload):
        result.tried += 1
        try:
            plan = planner.plan(candidate.changes)
            shortage = plan.shortage()
        except ConfigError as error:
            _refuse(result, _reason(error.problems[0]), f"{candidate.name}: {error.problems[0]}")
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
    """What is in host memory with these changes to the command line, in words."""
    wanted = with_changes(typed, offload.changes).offload
    moved = {"the optimizer": wanted.cpu_optimizer, "the parameters": wanted.cpu_parameters}
    return tuple(words for words, is_moved in moved.items() if is_moved)


def _refuse(result: Search, reason: str, example: str, *, better: bool = False) -> None:
    count, before = result.refused.get(reason, (0, example))
    result.refused[reason] = (count + 1, example if better else before)


def _reason(problem: str) -> str:
    """The reason behind a problem: the first flag that it names, or the problem without its numbers."""
    flags = re.findall(r"--[a-z][\w-]*", problem)
    return f"{flags[0]} does not allow it" if flags else re.sub(r"\d[\d,.]*", "N", problem)
