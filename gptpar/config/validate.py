"""Collects all problems of a configuration before long work starts. Pure but for looking at paths."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from gptpar.config import Config, Flags
from gptpar.config.elsewhere import OF_THE_LAUNCH, OTHER_EXPERTS
from gptpar.config.fields import Derived, Missing, Notes, completed, flag_name, range_problem
from gptpar.config.flags import ParsedFlags
from gptpar.config.sections.batch import check_batch, check_duration, check_first_step, derive_batch
from gptpar.config.sections.checkpoint import check_checkpoint, derive_saves
from gptpar.config.sections.data import check_data, check_files, derive_data
from gptpar.config.sections.model import check_model, complete_model, derive_model
from gptpar.config.sections.offload import check_offload
from gptpar.config.sections.optimizer import check_schedule, check_schedule_lengths
from gptpar.config.sections.parallel import check_parallel, derive_parallel
from gptpar.config.sections.precision import check_precision, derive_precision
from gptpar.config.sections.recompute import check_recompute, derive_recompute
from gptpar.errors import ConfigError

NUMBERS = (int, float, tuple)
"""Types of a field that is a number, or several."""


def resolve(
    parsed: ParsedFlags, world_size: int, *, more: Callable[[Flags], Iterable[str]] | None = None
) -> tuple[Config, list[Derived]]:
    """The door: derive, validate and complete.

    Args:
        more: finds problems that this room cannot know of.

    Raises:
        ConfigError: with all problems of the command line and of the configuration.
    """
    wrong = out_of_range(parsed.flags)
    # Nothing is derived from, or checked against, a number that cannot be.
    typed = with_defaults(parsed.flags, wrong)
    flags, derived = derive(typed, world_size)
    problems = [*(range_problems(parsed.flags) if wrong else ()), *_derived_out_of_range(flags, typed, derived)]
    found = [*find_problems(flags, world_size), *(more(flags) if more else ())]
    # A sentence that asks for a flag says nothing new if the flag was given, and its value was refused.
    refused = {flag_name(name.split(".")[1]) for name in {*parsed.refused, *wrong}}
    problems += [p for p in found if not (isinstance(p, Missing) and refused.intersection(re.findall(r"--[\w-]+", p)))]
    problems += [*_launch_problems(parsed, world_size), *_ignored_experts(parsed)]
    if problems or parsed.problems:
        raise ConfigError([*parsed.problems, *map(parsed.as_written, problems)])
    return complete(flags), [*parsed.derived, *derived]


def complete(flags: Flags) -> Config:
    """The configuration that flags say.

    Args:
        flags: the flags that ``derive`` returned without problems.

    Raises:
        TypeError: a field that must be known is open.
    """
    sections: dict[str, Any] = {
        name: completed(kind, getattr(flags, name)) for name, kind in _section_types().items() if name != "model"
    }
    return Config(model=complete_model(flags.model, flags.tokenizer), **sections)


@cache
def _section_types() -> dict[str, type]:
    return typing.get_type_hints(Config)


def _derived_out_of_range(flags: Flags, typed: Flags, derived: Iterable[Derived]) -> Iterator[str]:
    """Problems of derived numbers; what was typed is in its range by now, so other numbers are the reason."""
    reasons = {one.name: one.reason for one in derived}
    for name, problem in out_of_range(flags, checked=typed).items():
        field = name.split(".")[1]
        reason = reasons.get(field.replace("_", " "), "other flags")
        yield f"{flag_name(field)} follows from {reason} and {problem}: give it, or other numbers."


def _launch_problems(parsed: ParsedFlags, world_size: int) -> Iterator[str]:
    """Processes that flags alone place among others would each train by themselves."""
    size, rank = (parsed.launched.get(name) for name in OF_THE_LAUNCH)
    wrong = [f"--world-size is {size}"] if size and size != str(world_size) else []
    wrong += [f"--rank is {rank}"] if rank and not (rank.isdecimal() and int(rank) < world_size) else []
    if wrong:
        yield (
            f"{' and '.join(wrong)}, but {world_size} process(es) take part; torchrun starts more, and sets RANK and "
            "WORLD_SIZE in the environment, which places them."
        )


def _ignored_experts(parsed: ParsedFlags) -> Iterator[str]:
    """Flags of another program's experts have no effect on a dense model, and would have had one on this."""
    ignored = [note.split(":")[0] for note in parsed.without_effect if note.endswith(OTHER_EXPERTS)]
    if ignored and parsed.flags.model.has_experts:
        yield (
            f"{', '.join(ignored)}: {OTHER_EXPERTS}, and --num-experts is {parsed.flags.model.num_experts}: leave "
            "these out; gptpar pretrain --help lists the flags of its own experts."
        )


def derive(flags: Flags, world_size: int) -> tuple[Flags, list[Derived]]:
    """Fill what follows from other flags.

    Args:
        flags: the flags as typed.
        world_size: number of processes the run will have.

    Returns:
        The filled flags, and the derived values with their reasons.
    """
    notes = Notes(flags)
    derive_model(notes)
    derive_parallel(notes, world_size)
    derive_batch(notes, world_size)
    derive_precision(notes)
    derive_data(notes)
    if _is_touched(flags, "recompute"):
        derive_recompute(notes)
    if _is_touched(flags, "checkpoint"):
        derive_saves(notes)
    return notes.flags, notes.derived


def find_problems(flags: Flags, world_size: int) -> list[str]:
    """One sentence for each problem, with the numbers and a remedy; empty when they can run."""
    batch = [*check_batch(flags, world_size), *check_duration(flags)]
    return [
        *check_model(flags),
        *check_parallel(flags, world_size),
        *batch,
        *check_schedule(flags),
        *([] if batch else [*check_first_step(flags), *check_schedule_lengths(flags)]),
        *check_precision(flags, world_size),
        *(check_recompute(flags) if _is_touched(flags, "recompute") else ()),
        *(check_offload(flags, world_size) if _is_touched(flags, "offload") else ()),
        *(check_checkpoint(flags) if _is_touched(flags, "checkpoint") else ()),
        *check_data(flags),
        *check_files(flags),
    ]


def _is_touched(flags: Flags, section: str) -> bool:
    """Whether a flag of a section is given. Sections that no run needs have no problem without one."""
    return getattr(flags, section) != getattr(Flags(), section)


def out_of_range(flags: Flags, *, checked: Flags | None = None) -> dict[str, str]:
    """``section.field`` of each number that is too small or too large -> a part of a sentence that says so.

    Args:
        checked: flags without such numbers; sections that are the same are not looked at.
    """
    found = {}
    for section, fields in _limits():
        values = getattr(flags, section)
        if checked is not None and values is getattr(checked, section):
            continue
        for name, limits in fields:
            value = getattr(values, name)
            if type(value) in NUMBERS and (problem := range_problem(value, limits)):
                found[f"{section}.{name}"] = problem
    return found


@cache
def _limits() -> list[tuple[str, list[tuple[str, Any]]]]:
    """(section, (field, its limits) of each flag) of each section."""
    sections = [(section.name, getattr(Flags(), section.name)) for section in dataclasses.fields(Flags)]
    return [
        (name, [(field.name, field.metadata) for field in dataclasses.fields(values) if field.metadata])
        for name, values in sections
    ]


def range_problems(flags: Flags) -> list[str]:
    """One sentence for each number out of range."""
    return [f"{flag_name(name.split('.')[1])} {problem}." for name, problem in out_of_range(flags).items()]


def with_defaults(flags: Flags, names: Iterable[str]) -> Flags:
    """A copy whose fields named here (``section.field``) have their defaults again."""
    return flags.with_values({name: Flags().value(name) for name in names})
