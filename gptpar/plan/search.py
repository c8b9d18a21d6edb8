"""The best of all layouts: every candidate judged by memory and time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gptpar.config.fields import flag_name
from gptpar.errors import ConfigError
from gptpar.plan.planner import Changes, Plan, Planner


@dataclass
class Search:
    """What a search has found.

    Attributes:
        on_host: what every layout has in host memory, in words.
        accepted: plans that fit, fastest first.
        refused: reason -> (how many, an example).
        tried: how many layouts were looked at.
    """

    on_host: tuple[str, ...]
    accepted: list[Plan] = field(default_factory=list)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    tried: int = 0


def search(planner: Planner) -> Search:
    """Judge all candidates; where none fits, again with more and more in host memory, which costs time.

    What is found is that of the last time.
    """
    for offload in planner.offloads():
        found = _judged(planner, offload)
        if found.accepted:
            break
    found.accepted.sort(key=lambda plan: (plan.time.total, plan.need))
    return found


def _judged(planner: Planner, offload: Changes) -> Search:
    """All candidates with something in host memory."""
    result = Search(planner.on_host(offload))
    nearest = float("inf")
    for candidate in planner.candidates():
        changes = {**candidate, **offload}
        result.tried += 1
        try:
            plan = planner.plan(changes)
            shortage = plan.shortage()
        except ConfigError as error:
            _refuse(result, _reason(error.problems[0]), f"{_named(changes)}: {error.problems[0]}")
            continue
        if not shortage:
            result.accepted.append(plan)
            continue
        reason = "does not fit into a GPU's memory" if not plan.fits_gpu else "does not fit into the host's memory"
        closest = plan.need < nearest
        nearest = min(nearest, plan.need)
        _refuse(result, reason, f"{_named(changes)}: {shortage}", better=closest)
    return result


def _refuse(result: Search, reason: str, example: str, *, better: bool = False) -> None:
    count, before = result.refused.get(reason, (0, example))
    result.refused[reason] = (count + 1, example if better else before)


def _reason(problem: str) -> str:
    """Problems that differ in their numbers alone are one reason: the flag that is at fault."""
    flags = re.findall(r"--[a-z][\w-]*", problem)
    return f"{flags[0]} does not allow it" if flags else re.sub(r"\d[\d,.]*", "N", problem)


def _named(changes: Changes) -> str:
    """A candidate in a few words."""
    names = {
        "parallel.tensor_model_parallel_size": "tp",
        "parallel.pipeline_model_parallel_size": "pp",
        "parallel.num_virtual_stages_per_pipeline_rank": "chunks ",
        "parallel.zero_stage": "ZeRO-",
        "batch.micro_batch_size": "micro-batch ",
        "recompute.recompute_granularity": "recompute ",
    }
    words = [f"{label}{changes[name]}" for name, label in names.items() if changes.get(name) is not None]
    moved = [name for name, value in changes.items() if name.startswith("offload.") and value is True]
    return ", ".join(words + [flag_name(name.split(".")[1]) for name in moved])
