"""Cases of ``check-layouts`` that several files run."""

from __future__ import annotations

from gptpar.cli.check_layouts import SMALL
from gptpar.config.flags import parse_flags
from gptpar.plan.space import dimensions, spaces
from gptpar.plan.space.candidate import Candidate, flags_of
from gptpar.topology.layout import Layout

WORDS = [*SMALL.split(), "--fp64"]
STEPS = 2
TOLERANCE = 1e-10
"""Largest relative difference, in fp64."""

VARIANTS = {option.name: tuple(flags_of(option.changes)) for option in spaces.VARIANTS}
"""What is proved in every layout, as flags."""
ALONE = Candidate()


def case(layout: Layout, *flags: str) -> Candidate:
    """A layout with flags."""
    parsed = parse_flags(list(flags))
    assert not parsed.problems
    changes = {name: getattr(getattr(parsed.config, name.split(".")[0]), name.split(".")[1]) for name in parsed.given}
    sizes = dimensions.sizes(layout)[0].changes
    return Candidate({**sizes, **changes}, f"{layout.describe()} {' '.join(flags)}", layout)
