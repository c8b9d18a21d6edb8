"""Cases of ``check-layouts`` that several files run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gptpar.cli.check_layouts import SMALL, case_config
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config.flags import parse_flags
from gptpar.plan.space import dimensions, spaces
from gptpar.plan.space.candidate import Candidate, flags_of
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh

WORDS = [*SMALL.split(), "--fp64"]
FEWER_SAMPLES = [*WORDS, "--global-batch-size", "4", "--num-layers", "4"]
"""Two processes of the data axis still add up two micro-batches each, and four virtual stages have a layer each."""
STEPS = 2
TOLERANCE = 1e-10
"""Largest relative difference, in fp64."""

VARIANTS = {option.name: tuple(flags_of(option.changes)) for option in spaces.VARIANTS}
"""What is proved in every layout, as flags."""
ALONE = Candidate()


def case(mesh: Mesh, *flags: str) -> Candidate:
    """A layout with flags."""
    parsed = parse_flags(list(flags))
    assert not parsed.problems
    changes = {name: getattr(getattr(parsed.flags, name.split(".")[0]), name.split(".")[1]) for name in parsed.given}
    sizes = dimensions.sizes(mesh)[0].changes
    return Candidate({**sizes, **changes}, f"{mesh.describe()} {' '.join(flags)}", mesh)


def chained_outcomes(
    rank: int,
    folder: Path,
    cases: Sequence[tuple[Mesh, str]],
    words: Sequence[str],
    *,
    saved: int,
    steps: int,
    kind: type[CaseRun] = CaseRun,
) -> list[Outcome]:
    """Train each case and save it; it goes on from the checkpoint of the case before, the first one from its own.

    Args:
        cases: layouts of equally many processes, with flags.
        words: flags of all cases.
        saved: steps before the save.
        steps: steps in all.

    Returns:
        The outcome of each case; complete on the main process.
    """
    outcomes = []
    topologies: dict[Mesh, Topology] = {}
    for number, (mesh, flags) in enumerate(cases):
        if mesh not in topologies:
            topologies[mesh] = make_topology(mesh, rank, torch.device("cpu"))
        run = kind(case_config(words, case(mesh, *flags.split()), mesh.world_size), topologies[mesh])
        run.train(0, saved)
        run.save(folder / str(number), saved)
        run.resume(folder / str(max(0, number - 1)))
        run.train(saved, steps)
        run.trainer.close()
        outcomes.append(run.outcome)
    return outcomes


def outcomes_and_reference(
    rank: int, folder: Path, cases: Sequence[tuple[Mesh, str]], words: Sequence[str], **how: Any
) -> list[Outcome]:
    """Those of :func:`chained_outcomes`, and on the main process, last, that of one process."""
    outcomes = chained_outcomes(rank, folder, cases, words, **how)
    if rank == 0:
        alone = how["kind"](case_config(words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
        alone.train(0, how["steps"])
        alone.trainer.close()
        outcomes.append(alone.outcome)
    return outcomes
