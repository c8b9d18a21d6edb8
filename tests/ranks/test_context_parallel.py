"""Context parallelism computes the same as one process, beside every other axis, and any layout resumes its saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar.cli.check_layouts import MODELS, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config.sections import parallel
from gptpar.data.loader import MicroBatch
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import ALONE, FEWER_SAMPLES, STEPS, TOLERANCE, VARIANTS, WORDS, case
from tests.spawn import spawn

A2A, GATHER = ("--cp-comm-type", "a2a"), ("--cp-comm-type", "allgather")
TWO_SAMPLES = [*WORDS, "--num-layers", "4", "--micro-batch-size", "2"]
DROPOUT = [*TWO_SAMPLES, "--hidden-dropout", "0.2"]
DROPPED_PROBABILITIES = [*DROPOUT, "--attention-dropout", "0.3"]
GPT, BLOOM, LLAMA, MUON = ([*FEWER_SAMPLES, *MODELS[name].split()] for name in ("gpt", "bloom", "llama", "muon"))
DOCUMENTS = [*TWO_SAMPLES, *MODELS["documents"].split()]
PER_TOKEN = [*DOCUMENTS, "--calculate-per-token-loss"]
FEW_GROUPS = [*LLAMA, "--num-query-groups", "2"]
CASES = [
    (GPT, case(Mesh(context=4), *A2A, "--zero-stage", "3")),
    (GPT, case(Mesh(context=4), *GATHER, *VARIANTS["CPU optimizer 0.6"])),
    (GPT, case(Mesh(tensor=2, context=2), *GATHER, "--sequence-parallel", "--zero-stage", "1")),
    (GPT, case(Mesh(pipeline=2, context=2), *A2A, *VARIANTS["CPU optimizer 0.05"])),
    (GPT, case(Mesh(data=2, context=2), *GATHER, "--zero-stage", "2", *VARIANTS["full recompute"])),
    (DOCUMENTS, case(Mesh(data=2, context=2), *A2A, "--zero-stage", "1", *VARIANTS["selective"])),
    (DOCUMENTS, case(Mesh(context=4), *GATHER, *VARIANTS["all on the CPU"])),
    (
        DOCUMENTS,
        case(Mesh(pipeline=2, context=2), *GATHER, *("--num-virtual-stages-per-pipeline-rank", "2")),
    ),
    (PER_TOKEN, case(Mesh(tensor=2, context=2), *A2A, "--sequence-parallel", *VARIANTS["selective"])),
    (BLOOM, case(Mesh(tensor=2, context=2), *A2A, "--sequence-parallel")),
    (BLOOM, case(Mesh(data=2, context=2), *GATHER, "--zero-stage", "3")),
    (FEW_GROUPS, case(Mesh(context=4), *A2A, "--zero-stage", "2")),
    (LLAMA, case(Mesh(tensor=2, context=2), *GATHER, "--sequence-parallel", *VARIANTS["selective"])),
    (MUON, case(Mesh(data=2, context=2), *A2A, "--zero-stage", "1")),
    (MUON, case(Mesh(tensor=2, context=2), *GATHER, "--zero-stage", "3")),
    (DROPOUT, case(Mesh(tensor=2, context=2), *GATHER, "--sequence-parallel", *VARIANTS["every 2"])),
    (DROPPED_PROBABILITIES, case(Mesh(data=2, context=2), *A2A, "--zero-stage", "3")),
    (DROPPED_PROBABILITIES, case(Mesh(context=4), *GATHER, "--zero-stage", "1", *VARIANTS["selective"])),
    (DROPPED_PROBABILITIES, case(Mesh(pipeline=2, context=2), *A2A, *VARIANTS["full recompute"])),
]
"""Those of one model resume each other's checkpoints, the first one what one process saved."""
NAMES = {
    id(GPT): "gpt",
    id(BLOOM): "bloom",
    id(LLAMA): "llama",
    id(MUON): "muon",
    id(DOCUMENTS): "documents",
    id(PER_TOKEN): "documents, tokens alike",
    id(FEW_GROUPS): "fewer groups than ranks",
    id(DROPOUT): "dropout",
    id(DROPPED_PROBABILITIES): "dropout of attention",
}


def _run_alone(words: list[str], save_in: Path) -> tuple[Outcome, float]:
    run = CaseRun(case_config(words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, STEPS)
    run.save(save_in, STEPS)
    run.train(STEPS, STEPS + 1)
    return run.outcome, _evaluated(run)


def _evaluated(run: CaseRun) -> float:
    """The mean loss of a global batch whose samples end in different amounts of padding."""
    batches = []
    for number, batch in enumerate(run._batches(STEPS)):
        mask = torch.ones(batch.tokens_BS.shape)
        place = number * run.topology.mesh.data + run.topology.position("data")
        mask[:, 3 + place :] = 0
        batches.append(MicroBatch(batch.tokens_BS, batch.labels_BS, mask, batch.position_ids_BS, batch.cu_seqlens))
    total, count = run.trainer.evaluate_sum(batches).tolist()
    return total / count


def _run_all(rank: int, folder: Path, models: list[str]) -> list[tuple[Outcome, float]]:
    found = []
    topologies: dict[Mesh, Topology] = {}
    saved = {name: folder / name for name in models}
    for number, (words, this) in enumerate(CASES):
        if this.mesh not in topologies:
            topologies[this.mesh] = make_topology(this.mesh, rank, torch.device("cpu"))
        run = CaseRun(case_config(words, this, 4), topologies[this.mesh])
        parallel.MAX_GATHERED_BYTES = 1 + number % 2 * 2**20  # in every second case a group at a time
        run.train(0, STEPS)
        run.save(folder / str(number), STEPS)
        run.resume(saved[NAMES[id(words)]])
        saved[NAMES[id(words)]] = folder / str(number)
        run.train(STEPS, STEPS + 1)
        found.append((run.outcome, _evaluated(run)))
        run.trainer.close()
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[tuple[Outcome, float], tuple[Outcome, float]]]:
    """(outcome, that of one process) of each case, from one start of four processes."""
    folder, threads = tmp_path_factory.mktemp("context"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = {id(words): words for words, _ in CASES}
        alone = {key: _run_alone(words, folder / NAMES[key]) for key, words in models.items()}
    finally:
        torch.set_num_threads(threads)
    found = spawn(_run_all, 4, folder, [NAMES[key] for key in models], timeout_s=500)[0]
    return [(one, alone[id(words)]) for one, (words, _) in zip(found, CASES, strict=True)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{NAMES[id(words)]}: {this.name}" for words, this in CASES])
def test_layout_equals_one_process(
    outcomes: list[tuple[tuple[Outcome, float], tuple[Outcome, float]]], number: int
) -> None:
    """Initial weights bit for bit; losses, norms, gradients and weights of each step, the last after a resume."""
    (found, evaluated), (wanted, evaluated_alone) = outcomes[number]
    assert difference([(found.initial, wanted.initial)]) == 0
    assert len(found.steps) == STEPS + 1
    assert step_difference(found.steps, wanted.steps) <= TOLERANCE
    assert difference(zip(found.gradients, wanted.gradients, strict=True)) <= TOLERANCE
    assert difference(zip(found.weights, wanted.weights, strict=True)) <= TOLERANCE
    assert evaluated == pytest.approx(evaluated_alone, rel=TOLERANCE)
