"""Layouts, ZeRO stages, schedules and recomputation compute the same as one process, and resume each other's saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.check_layouts import MODELS, SMALL, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config.flags import parse_flags
from gptpar.plan.space import spaces
from gptpar.tensor_parallel import TensorAxis
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import REPLICATED, Placement
from tests.ranks.layout_cases import ALONE, FEWER_SAMPLES, STEPS, TOLERANCE, VARIANTS, WORDS, case
from tests.spawn import spawn

ON_HOST = ("--cpu-offloading-num-layers", "3")
CASES = [
    case(Mesh(data=4), "--zero-stage", "3", *VARIANTS["every 2"], "--checkpoint-in-cpu"),
    case(Mesh(tensor=4), "--sequence-parallel", *VARIANTS["selective"]),
    case(Mesh(data=2, pipeline=2), "--zero-stage", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    case(Mesh(data=2, tensor=2), "--zero-stage", "1", "--sequence-parallel", *VARIANTS["MLP in tiles"]),
    case(Mesh(pipeline=4), *VARIANTS["full recompute"], *VARIANTS["CPU optimizer 0.05"]),
    case(
        Mesh(tensor=2, pipeline=2),
        *("--num-virtual-stages-per-pipeline-rank", "2"),
        *VARIANTS["selective"],
        *VARIANTS["CPU optimizer 0.05"],
    ),
    case(Mesh(data=2, pipeline=2), "--zero-stage", "1", *VARIANTS["CPU optimizer 0.95"]),
    case(Mesh(data=2, pipeline=2), "--zero-stage", "3", *VARIANTS["norms, activation"], *ON_HOST),
    case(Mesh(data=2, tensor=2), "--zero-stage", "2", "--sequence-parallel", *VARIANTS["CPU optimizer 0.6"]),
    case(Mesh(tensor=2, pipeline=2), *VARIANTS["all on the CPU"]),
    case(Mesh(data=4), "--zero-stage", "1", *VARIANTS["CPU optimizer 0.6"]),
]
"""Each resumes what the one before saved, the first what one process saved."""

UNEVEN = [*FEWER_SAMPLES, "--vocab-size", "98", "--make-vocab-size-divisible-by", "2"]
FEW = [*WORDS, "--global-batch-size", "2"]
DROPOUT = [*FEWER_SAMPLES, "--hidden-dropout", "0.2", "--attention-dropout", "0.3"]
BLOOM = [*FEWER_SAMPLES, *MODELS["bloom"].split()]
LLAMA = [*FEWER_SAMPLES, *MODELS["llama"].split()]
DOCUMENTS = [*FEWER_SAMPLES, *MODELS["documents"].split()]
DROPPED_DOCUMENTS = [*DOCUMENTS, "--attention-dropout", "0.3"]
SINGLE = [
    (UNEVEN, case(Mesh(tensor=4))),  # shares of 24, 25, 24 and 25 rows
    (UNEVEN, case(Mesh(data=2, tensor=2), "--zero-stage", "3", "--sequence-parallel")),
    (UNEVEN, case(Mesh(tensor=4), "--sequence-parallel", *VARIANTS["CPU optimizer 0.6"])),
    (FEW, case(Mesh(pipeline=4))),
    (DROPOUT, case(Mesh(tensor=4), *VARIANTS["selective"])),
    (DROPOUT, case(Mesh(data=2, tensor=2), "--zero-stage", "3", "--sequence-parallel", *VARIANTS["full recompute"])),
    (DROPOUT, case(Mesh(tensor=2, pipeline=2), *VARIANTS["every 2"], "--distribute-saved-activations")),
    (
        DROPOUT,
        case(
            Mesh(data=2, pipeline=2),
            *("--zero-stage", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
            *VARIANTS["CPU optimizer 0.6"],
            *VARIANTS["saved tensors on the host"],
        ),
    ),
    (BLOOM, case(Mesh(tensor=4), "--sequence-parallel", *VARIANTS["CPU optimizer 0.6"])),
    (BLOOM, case(Mesh(data=2, tensor=2), "--zero-stage", "3", *VARIANTS["selective"])),
    (BLOOM, case(Mesh(data=2, pipeline=2), "--zero-stage", "1", *VARIANTS["all on the CPU"])),
    (LLAMA, case(Mesh(tensor=4), *VARIANTS["CPU optimizer 0.6"], *VARIANTS["MLP in tiles"])),
    (LLAMA, case(Mesh(data=2, tensor=2), "--zero-stage", "2", "--sequence-parallel", *VARIANTS["selective"], *ON_HOST)),
    (
        LLAMA,
        case(
            Mesh(tensor=2, pipeline=2),
            *("--num-virtual-stages-per-pipeline-rank", "2"),
            *VARIANTS["all on the CPU"],
        ),
    ),
    (DOCUMENTS, case(Mesh(tensor=2, pipeline=2), "--sequence-parallel", *VARIANTS["selective"], *ON_HOST)),
    (DROPPED_DOCUMENTS, case(Mesh(data=2, tensor=2), "--zero-stage", "3", *VARIANTS["full recompute"])),
]

ALL = [*((WORDS, this) for this in CASES), *SINGLE]
FURTHER = {len(CASES) + number for number in (0, 4, 8, 10, 11)}
"""Cases of a model that other cases cut as well, by layouts that CASES have."""


def run_alone(words: list[str], save_in: Path | None = None) -> Outcome:
    """The reference: one process, one step more than the others take before they resume."""
    run = CaseRun(case_config(words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, STEPS)
    if save_in:
        run.save(save_in, STEPS)
    run.train(STEPS, STEPS + 1)
    return run.outcome


def run_all(rank: int, folder: Path, numbers: list[int]) -> list[Outcome]:
    """These of all cases in turn in the same four processes; the main one has the outcomes."""
    outcomes = []
    topologies: dict[Mesh, Topology] = {}
    for number in numbers:
        words, this = ALL[number]
        if this.mesh not in topologies:
            topologies[this.mesh] = make_topology(this.mesh, rank, torch.device("cpu"))
        run = CaseRun(case_config(words, this, 4), topologies[this.mesh])
        run.train(0, STEPS)
        if number < len(CASES):
            run.save(folder / str(number + 1), STEPS)
            run.resume(folder / str(number))
        run.train(STEPS, STEPS + 1)
        run.trainer.close()
        outcomes.append(run.outcome)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Outcome, Outcome]]:
    """Number -> (outcome, what it is to equal) of the cases that are tested, from one start of four processes."""
    name = "test_layout_equals_one_process"
    asked = {item.callspec.params["number"] for item in request.session.items if item.name.startswith(f"{name}[")}
    before = range(max((number for number in asked if number < len(CASES)), default=-1))  # each needs the one before
    numbers = sorted(asked.union(before))
    folder = tmp_path_factory.mktemp("layouts")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        every = {id(words): words for words, _ in (ALL[number] for number in numbers)}
        alone = {key: run_alone(words, folder / "0" if words is WORDS else None) for key, words in every.items()}
    finally:
        torch.set_num_threads(threads)
    found = spawn(run_all, 4, folder, numbers, timeout_s=300)[0]
    return {number: (one, alone[id(ALL[number][0])]) for number, one in zip(numbers, found, strict=True)}


NAMES = {id(DROPOUT): " dropout", id(BLOOM): " bloom", id(LLAMA): " llama"}
NAMES |= {id(DOCUMENTS): " documents", id(DROPPED_DOCUMENTS): " documents and dropout"}


def param(number: int) -> Any:
    words, this = ALL[number]
    marks = [pytest.mark.long] * (number in FURTHER)
    return pytest.param(number, id=f"{this.name}{NAMES.get(id(words), '')}", marks=marks)


@pytest.mark.parametrize("number", [param(number) for number in range(len(ALL))])
def test_layout_equals_one_process(outcomes: dict[int, tuple[Outcome, Outcome]], number: int) -> None:
    """Initial weights bit for bit; losses, norms, gradients and weights of each step, the last after a resume."""
    found, wanted = outcomes[number]
    assert difference([(found.initial, wanted.initial)]) == 0
    assert len(found.steps) == STEPS + 1
    assert step_difference(found.steps, wanted.steps) <= TOLERANCE
    assert difference(zip(found.gradients, wanted.gradients, strict=True)) <= TOLERANCE
    assert difference(zip(found.weights, wanted.weights, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("variant", ["CPU optimizer 0.6", "all on the CPU"])
def test_in_bf16_the_host_s_gradients_are_the_device_s(variant: str) -> None:
    """Sums travel as wide as they are; a parameter that is cut between the two has its gradient in one piece."""
    words, found = [*SMALL.split(), "--bf16"], []
    for flags in ((), VARIANTS[variant]):
        run = CaseRun(case_config(words, case(Mesh(), *flags), 1), Topology(Mesh(), 0, torch.device("cpu")))
        run.train(0, 1)
        run.trainer.close()
        found.append(run.outcome.gradients[0])
    on_device, on_both = found
    assert on_device.keys() == on_both.keys()
    for name, gradient in on_device.items():
        assert on_both[name].dtype == gradient.dtype == torch.float32
        assert torch.equal(on_both[name], gradient), name


ONE_ADDEND = [option.name for option in spaces.GRADIENTS_LEAVE]


@pytest.mark.parametrize("number", range(len(ONE_ADDEND)), ids=ONE_ADDEND)
def test_gradients_that_leave_at_once_equal_those_that_stay(number: int) -> None:
    """In one piece of eight samples instead of eight pieces of one."""
    alone = run_alone(WORDS)
    case = list(spaces.to_prove(parse_flags(WORDS).flags, 1))[number]
    assert case.name in ONE_ADDEND
    run = CaseRun(case_config(WORDS, case, 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, STEPS + 1)
    run.trainer.close()
    assert run.config.offload.gradients_leave_at_once and run.config.batch.micro_batch_size == 8
    assert step_difference(run.outcome.steps, alone.steps) <= TOLERANCE
    assert difference(zip(run.outcome.gradients, alone.gradients, strict=True)) <= TOLERANCE
    assert difference(zip(run.outcome.weights, alone.weights, strict=True)) <= TOLERANCE


def test_the_cases_are_a_cover() -> None:
    """All six ways to cut four processes, and every ZeRO stage that shards."""
    assert len({this.mesh for this in CASES}) == 6 == sum(4 % (t * p) == 0 for t in (1, 2, 4) for p in (1, 2, 4))
    zero = {c.flags[c.flags.index("--zero-stage") + 1] for c in CASES if "--zero-stage" in c.flags}
    assert zero == {"1", "2", "3"}


SUM = Placement(gradient_sum=frozenset({"tensor"}))
BETWEEN, INSIDE = "between_layers", "inside_layers"
HEAD_NORMS, NORMS = (
    (".attention.query_norm.", ".attention.key_norm."),
    (".attention_norm.", ".mlp_norm.", "final_norm."),
)
WRONG: list[tuple[str, Placement, tuple[str, ...], tuple[str, ...]]] = [
    (INSIDE, REPLICATED, (), HEAD_NORMS),
    (INSIDE, REPLICATED, ("--sequence-parallel",), HEAD_NORMS),
    (INSIDE, REPLICATED, (VARIANTS["all on the CPU"]), HEAD_NORMS),
    (BETWEEN, REPLICATED, ("--sequence-parallel",), NORMS),
    (BETWEEN, SUM, (), NORMS),
]
"""What is declared as what, the layout's flags, and words in the names of the parameters that it is declared of."""


def run_wrong(rank: int) -> list[Outcome]:
    """One step of models in which some replicated parameters declare another placement of their gradient."""
    outcomes = []
    topology = make_topology(Mesh(tensor=2), rank, torch.device("cpu"))
    for what, placement, flags, _ in WRONG:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorAxis, what, property(lambda axis, placement=placement: placement))
            run = CaseRun(case_config(LLAMA, case(topology.mesh, *flags), 2), topology)
        run.train(0, 1)
        run.trainer.close()
        outcomes.append(run.outcome)
    return outcomes


def test_wrong_declarations_are_caught() -> None:
    """A half of the gradient, or twice as much, in the parameters that it is declared of and in no other."""
    alone = CaseRun(case_config(LLAMA, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
    alone.train(0, 1)
    wanted = alone.outcome
    for found, (*_, words) in zip(spawn(run_wrong, 2)[0], WRONG, strict=True):
        errors = {
            name: difference([({name: found.gradients[0][name]}, {name: grad})])
            for name, grad in wanted.gradients[0].items()
        }
        expected = {name for name in errors if any(word in name for word in words)}
        assert {name for name, error in errors.items() if error > TOLERANCE} == expected
        assert len(expected) >= 8 and min(errors[name] for name in expected) > 0.1
        assert step_difference(found.steps, wanted.steps) > 1e4 * TOLERANCE
