"""The harness of layouts: families of cases, each a model that many layouts train, resume and evaluate as one process.

A case is a layout with flags, as ``check-layouts`` tries them. Where all combinations of a model are to be proved, that
command does it; a family has the few cases that together meet each pair of what its model makes difficult.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gptpar.cli.check_layouts import SMALL, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config.flags import parse_flags
from gptpar.config.sections import parallel
from gptpar.data.loader import MicroBatch
from gptpar.engine import fused_sums
from gptpar.plan.space import dimensions, spaces
from gptpar.plan.space.candidate import Candidate, flags_of
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from tests.spawn import RankPool

WORDS = [*SMALL.split(), "--fp64"]
FEWER_SAMPLES = [*WORDS, "--global-batch-size", "4", "--num-layers", "4"]
"""Two processes of the data axis still add up two micro-batches each, and four virtual stages have a layer each."""
TOLERANCE = 1e-10
"""Largest relative difference, in fp64."""

VARIANTS = {option.name: tuple(flags_of(option.changes)) for option in spaces.VARIANTS}
"""What is proved in every layout, as flags."""
ALONE = Candidate()
Pools = Callable[[int], RankPool]
"""Processes by their number."""
_AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


def case(mesh: Mesh, *flags: str) -> Candidate:
    """A layout with flags."""
    parsed = parse_flags(list(flags))
    assert not parsed.problems
    changes = {name: getattr(getattr(parsed.flags, name.split(".")[0]), name.split(".")[1]) for name in parsed.given}
    sizes = dimensions.sizes(mesh)[0].changes
    return Candidate({**sizes, **changes}, f"{mesh.describe()} {' '.join(flags)}", mesh)


def at(layout: str, flags: str = "", *variants: str) -> Candidate:
    """A case by words, such as ``at("dp2 tp2", "--zero-stage 3", "full recompute")``: sizes, flags, ``VARIANTS``."""
    mesh = Mesh(**{_AXES[word[:2]]: int(word[2:]) for word in layout.split()})
    return case(mesh, *flags.split(), *(flag for name in variants for flag in VARIANTS[name]))


@dataclass(frozen=True)
class Family:
    """Layouts of equally many processes that train one model.

    Attributes:
        words: flags of all cases.
        cases: each goes on from the checkpoint of the one before, the first from what one process saved.
        kind: what trains a case.
        saved: steps before the save.
        steps: steps in all; with as many as ``saved``, nothing is saved.
    """

    words: Sequence[str]
    cases: Sequence[Candidate]
    kind: type[CaseRun] = CaseRun
    saved: int = 1
    steps: int = 2


def assert_equals_one_process(family: Family, folder: Path, ranks: Pools) -> Outcome:
    """Train all cases of a family, and compare each with one process, whose outcome is returned.

    Initial weights are equal bit for bit; losses, norms, gradients and weights of each step, the loss of an evaluation,
    and what experts count, are equal within ``TOLERANCE``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each process has: with others, sums are rounded in another order
    try:
        alone, evaluated_alone = _train(run_alone(family), family, folder / "0", None)
    finally:
        torch.set_num_threads(threads)
    found = ranks(family.cases[0].mesh.world_size).run(_train_all, family, folder, timeout_s=500.0)[0]
    for this, (one, evaluated) in zip(family.cases, found, strict=True):
        assert len(one.steps) == family.steps
        differences = apart(one, alone)
        assert differences["initial weights"] == 0, this.name
        assert max(differences.values()) <= TOLERANCE, f"{this.name}: {differences}"
        assert evaluated == pytest.approx(evaluated_alone, rel=TOLERANCE), this.name
        for name in {"expert bias", "choices of experts"} & alone.weights[-1].keys():
            for after, wanted in zip(one.weights, alone.weights, strict=True):
                assert torch.equal(after[name], wanted[name]), f"{this.name}: {name}"
    return alone


def apart(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """How far two runs differ, relatively."""
    return {
        "initial weights": difference([(found.initial, wanted.initial)]),
        "steps": step_difference(found.steps, wanted.steps),
        "gradients": difference(zip(found.gradients, wanted.gradients, strict=True)),
        "weights": difference(zip(found.weights, wanted.weights, strict=True)),
    }


def run_alone(family: Family) -> CaseRun:
    """A run of one process, which has taken no step."""
    return family.kind(case_config(family.words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))


def _train_all(rank: int, family: Family, folder: Path) -> list[tuple[Outcome, float]]:
    """The outcome and the evaluation of each case; complete on the main process."""
    found = []
    topologies: dict[Mesh, Topology] = {}
    fused_sums.MIN_ELEMENTS = 0  # gradients of small weights, too, are formed in their places
    for number, this in enumerate(family.cases):
        if this.mesh not in topologies:
            topologies[this.mesh] = make_topology(this.mesh, rank, torch.device("cpu"))
        parallel.MAX_GATHERED_BYTES = 1 + number % 2 * 2**20  # in every second case a group of heads at a time
        run = family.kind(case_config(family.words, this, this.mesh.world_size), topologies[this.mesh])
        found.append(_train(run, family, folder / str(number + 1), folder / str(number)))
    return found


def _train(run: CaseRun, family: Family, mine: Path, before: Path | None) -> tuple[Outcome, float]:
    run.train(0, family.saved)
    if family.steps > family.saved:
        run.save(mine, family.saved)
        if before is not None:
            run.resume(before)
        run.train(family.saved, family.steps)
    evaluated = _evaluated(run, family.saved)
    run.trainer.close()
    return run.outcome, evaluated


def _evaluated(run: CaseRun, step: int) -> float:
    """The mean loss of a global batch whose samples end in different amounts of padding."""
    batches = []
    for number, batch in enumerate(run._batches(step)):
        size, length = batch.tokens_BS.shape
        place = number * run.topology.mesh.data + run.topology.position("data")
        numbers = size * place + torch.arange(size)  # of the samples, whatever micro-batches they are in
        counted = 3 + numbers % (length - 3)
        mask = (torch.arange(length) < counted[:, None]).float()
        batches.append(MicroBatch(batch.tokens_BS, batch.labels_BS, mask, batch.position_ids_BS, batch.cu_seqlens))
    total, count = run.trainer.evaluate_sum(batches).tolist()
    return total / count
