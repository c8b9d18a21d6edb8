"""Lets processes agree before they go on: an error of one is raised by all, and what must be the same is compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from gptpar.errors import ConfigError, GptparError, ProblemsError

MAX_LISTED = 10
"""Differences that are listed; further ones are counted."""


@contextmanager
def all_or_none(world: int) -> Iterator[None]:
    """Raise on all processes if one raises inside the block, with its rank, since the others would wait for it.

    There must be no collectives inside.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    everyone = [_plain(mine)]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, _plain(mine))
    first = next((rank for rank, error in enumerate(everyone) if error is not None), None)
    if first is None:
        return
    if mine is not None and all(error == everyone[first] for error in everyone):
        raise mine
    kind, texts = cast(Any, everyone[first])
    sentences = [f"rank {first}: {text}" for text in texts]
    raise kind(sentences if issubclass(kind, ProblemsError) else sentences[0]) from mine


def _plain(error: Exception | None) -> tuple[type[GptparError], list[str]] | None:
    """An error in a form that can be sent: the nearest of our own classes, and its sentences."""
    if isinstance(error, ProblemsError):
        return type(error), error.problems
    if error is None or isinstance(error, GptparError):
        return None if error is None else (GptparError, [str(error)])
    return GptparError, [f"{type(error).__name__}: {error}"]


def require_same(
    facts: Mapping[str, str],
    remedy: str,
    group: dist.ProcessGroup | None = None,
    error: type[ProblemsError] = ConfigError,
) -> None:
    """Check that all processes of a group say the same; all call this together.

    Args:
        facts: what has to be the same (a flag, a version, a parameter) -> its value, in words to be shown.
        remedy: what to do about a difference, as the end of a sentence.
        error: the class of the error.

    Raises:
        ProblemsError: on every process: the facts that differ, each with its values, machines and ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).digest()
    if len(set(_of_all(digest, group))) == 1:
        return
    everyone = _of_all((os.uname().nodename, dict(facts)), group)
    ranks = range(len(everyone)) if group is None else dist.get_process_group_ranks(group)
    places = [(rank, host) for rank, (host, _) in zip(ranks, everyone, strict=True)]
    problems = []
    for name in dict.fromkeys(name for _, said in everyone for name in said):
        who: dict[str, list[tuple[int, str]]] = {}
        for place, (_, said) in zip(places, everyone, strict=True):
            who.setdefault(said.get(name, "missing"), []).append(place)
        if len(who) > 1:
            values = " and ".join(f"{value} on {_machines(where)}" for value, where in who.items())
            problems.append(f"{name} is {values}: {remedy}")
    left = len(problems) - MAX_LISTED
    more = [f"{left} further differences are not listed: {remedy}"] if left > 0 else []
    raise error([*problems[:MAX_LISTED], *more])


def _of_all(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _machines(places: list[tuple[int, str]]) -> str:
    """``node1 (ranks 0, 1)`` for each machine; of many, the first three."""
    ranks: dict[str, list[str]] = {}
    for rank, host in places:
        ranks.setdefault(host, []).append(str(rank))
    machines = [f"{host} (rank{'s' if len(its) > 1 else ''} {', '.join(its)})" for host, its in ranks.items()]
    return ", ".join(machines[:3]) + (f" and {len(machines) - 3} more machines" if len(machines) > 3 else "")
