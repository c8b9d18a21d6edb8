"""Every reason why a configuration cannot run, found before any long work starts. Pure but for looking at paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from gptpar.config import Config
from gptpar.config.checks.batch import check_batch, check_duration
from gptpar.config.checks.data import check_data, check_files
from gptpar.config.checks.model import check_model
from gptpar.config.checks.offload import check_offload
from gptpar.config.checks.optimizer import check_precision, check_schedule
from gptpar.config.checks.parallel import check_parallel
from gptpar.config.checks.recompute import check_recompute
from gptpar.config.derive import Derived, derive
from gptpar.config.fields import flag_name
from gptpar.config.flags import ParsedFlags
from gptpar.errors import ConfigError


def resolve(
    parsed: ParsedFlags, world_size: int, *, more: Callable[[Config], Iterable[str]] | None = None
) -> tuple[Config, list[Derived]]:
    """Derive and validate.

    Args:
        more: finds problems that this room cannot know of.

    Raises:
        ConfigError: with all problems of the command line and of the configuration.
    """
    config, derived = derive(parsed.config, world_size)
    problems = [*parsed.problems, *out_of_range(parsed.config), *find_problems(config, world_size)]
    problems += more(config) if more else ()
    if problems:
        raise ConfigError(problems)
    return config, [*parsed.derived, *derived]


def out_of_range(config: Config) -> Iterator[str]:
    """Numbers beyond the limits that their flags declare; what was derived from them needs no sentence of its own."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for spec in dataclasses.fields(values):
            value, limits = getattr(values, spec.name), spec.metadata
            if value is None or not limits:
                continue
            if limits["least"] is not None and value < limits["least"]:
                yield f"{flag_name(spec.name)} is {value:g}; it must be at least {limits['least']}."
            elif limits["above"] is not None and value <= limits["above"]:
                yield f"{flag_name(spec.name)} is {value:g}; it must be more than {limits['above']}."


def find_problems(config: Config, world_size: int) -> list[str]:
    """One sentence for each problem, with the numbers and a remedy; empty when the configuration can run."""
    return [
        *check_model(config),
        *check_parallel(config, world_size),
        *check_batch(config, world_size),
        *check_duration(config),
        *check_schedule(config),
        *check_precision(config, world_size),
        *check_recompute(config),
        *check_offload(config),
        *check_data(config),
        *check_files(config),
    ]
