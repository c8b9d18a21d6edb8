"""Cases of ``check-layouts`` that several files run."""

from __future__ import annotations

from gptpar.cli.check_layouts.cases import Case
from gptpar.cli.check_layouts.main import SMALL
from gptpar.topology.layout import Layout

WORDS = [*SMALL.split(), "--fp64"]
STEPS = 2
TOLERANCE = 1e-10
"""Largest relative difference, in fp64."""


def case(layout: Layout, *flags: str) -> Case:
    """A layout with flags."""
    sizes = ("--tensor-model-parallel-size", str(layout.tensor), "--pipeline-model-parallel-size", str(layout.pipeline))
    return Case(f"{layout.describe()} {' '.join(flags)}", layout, (*sizes, *flags))
