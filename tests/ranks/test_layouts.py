"""Layouts, ZeRO stages, schedules, recomputation and offload compute what one process does, and resume each other."""

from pathlib import Path

import pytest
import torch

from gptpar.cli.check_layouts import MODELS, SMALL, case_config
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config.flags import parse_flags
from gptpar.plan.space import spaces
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import (
    FEWER_SAMPLES,
    TOLERANCE,
    VARIANTS,
    WORDS,
    Family,
    Pools,
    apart,
    assert_equals_one_process,
    at,
    case,
    run_alone,
)
from tests.unit.optim.plain_runs import LION_WORDS

A2A, GATHER, SPLIT_TOKENS = "--cp-comm-type a2a", "--cp-comm-type allgather", "--sequence-parallel"
TWO_STAGES = "--num-virtual-stages-per-pipeline-rank 2"
ON_HOST = "--cpu-offloading-num-layers 3"
FUSED = "--gradient-accumulation-fusion"
TWOS = "--micro-batch-size 2"
"""Where one process has all samples: it still adds up two micro-batches."""
PAIRS = [*FEWER_SAMPLES, "--micro-batch-size", "2"]
"""Micro-batches of two samples."""
FOUR_PAIRS = [*PAIRS, "--global-batch-size", "8"]


def model(name: str, words: list[str], *more: str) -> list[str]:
    return [*words, *MODELS[name].split(), *more]


DOCUMENTS = model("documents", PAIRS)
FAMILIES = {
    "two processes": Family(
        [*FEWER_SAMPLES, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"],
        [
            at("dp2", "--zero-stage 1"),
            at("dp2", "--zero-stage 2"),
            at("dp2", "--zero-stage 3", "full recompute"),
            at("tp2"),
            at("tp2", f"{SPLIT_TOKENS} {FUSED}", "CPU optimizer 0.6"),
            at("pp2"),
        ],
        saved=2,
    ),
    "gpt": Family(
        FEWER_SAMPLES,
        [
            at("dp4", "--zero-stage 3 --checkpoint-in-cpu", "every 2"),
            at("tp4", f"{SPLIT_TOKENS} {TWOS}", "selective"),
            at("dp2 pp2", f"--zero-stage 2 {TWO_STAGES}"),
            at("dp2 tp2", f"--zero-stage 1 {SPLIT_TOKENS} {FUSED}", "MLP in tiles"),
            at("pp4", "", "full recompute", "CPU optimizer 0.05"),
            at("cp4", f"{A2A} --zero-stage 3 {TWOS}"),
            at("tp2 pp2", f"{TWO_STAGES} {FUSED}", "selective", "CPU optimizer 0.05"),
            at("pp2 cp2", f"{A2A} --zero-stage 1", "some gradient sums on the host"),
            at("dp2 pp2", f"--zero-stage 3 {ON_HOST}", "norms, activation"),
            at("dp2 cp2", f"{GATHER} --zero-stage 2", "full recompute"),
            at("dp4", "--zero-stage 1", "CPU optimizer 0.6"),
        ],
    ),
    # Parts of 24, 25, 24 and 25 rows of the vocabulary.
    "uneven vocabulary": Family(
        [*FEWER_SAMPLES, "--vocab-size", "98", "--make-vocab-size-divisible-by", "2"],
        [
            at("dp2 tp2", f"--zero-stage 3 {SPLIT_TOKENS}"),
            at("tp4", f"{SPLIT_TOKENS} {TWOS}", "CPU optimizer 0.6"),
        ],
    ),
    "fewer micro-batches than stages": Family([*WORDS, "--global-batch-size", "2"], [at("pp4")]),
    "dropout": Family(
        [*FOUR_PAIRS, "--hidden-dropout", "0.2", "--attention-dropout", "0.3"],
        [
            at("tp2 pp2", "--distribute-saved-activations", "every 2"),
            at("dp2 pp2", f"--zero-stage 2 {TWO_STAGES}", "CPU optimizer 0.6", "saved tensors on the host"),
            at("dp2 cp2", f"{A2A} --zero-stage 3"),
            at("cp4", f"{GATHER} --zero-stage 1", "selective"),
        ],
    ),
    "dropout of hidden states": Family(
        [*PAIRS, "--hidden-dropout", "0.2"], [at("tp2 cp2", f"{GATHER} {SPLIT_TOKENS}", "every 2")]
    ),
    "bloom": Family(
        model("bloom", FEWER_SAMPLES),
        [
            at("dp2 tp2", "--zero-stage 3", "selective"),
            at("tp2 cp2", f"{A2A} {SPLIT_TOKENS} {TWOS}"),
            at("dp2 pp2", "--zero-stage 1", "all on the CPU"),
        ],
    ),
    "llama": Family(
        model("llama", FEWER_SAMPLES),
        [
            at("dp2 tp2", f"--zero-stage 2 {SPLIT_TOKENS} {ON_HOST}", "selective"),
            at("tp4", TWOS, "CPU optimizer 0.6", "MLP in tiles"),
            at("tp2 pp2", f"{TWO_STAGES} {FUSED}", "all on the CPU"),
            at("tp2 cp2", f"{GATHER} {SPLIT_TOKENS} {TWOS}", "selective"),
        ],
    ),
    "fewer groups than ranks": Family(
        model("llama", FEWER_SAMPLES, "--num-query-groups", "2"), [at("cp4", f"{A2A} --zero-stage 2 {TWOS}")]
    ),
    "documents": Family(
        DOCUMENTS,
        [
            at("dp2 cp2", f"{A2A} --zero-stage 1", "selective"),
            at("cp4", GATHER, "all on the CPU"),
            at("pp2 cp2", f"{GATHER} {TWO_STAGES}"),
            at("tp2 pp2", f"{SPLIT_TOKENS} {ON_HOST}", "selective"),
        ],
    ),
    "documents, tokens alike": Family(
        [*DOCUMENTS, "--calculate-per-token-loss"], [at("tp2 cp2", f"{A2A} {SPLIT_TOKENS}", "selective")]
    ),
    "documents and dropout": Family(
        model("documents", FOUR_PAIRS, "--attention-dropout", "0.3"),
        [at("dp2 tp2", "--zero-stage 3", "full recompute")],
    ),
    "muon": Family(
        model("muon", FEWER_SAMPLES),
        [
            at("dp2 cp2", f"{A2A} --zero-stage 1"),
            at("dp4", "--zero-stage 3 --cpu-parameters", "CPU optimizer 0.6"),
            at("dp2 tp2", f"--zero-stage 0 {SPLIT_TOKENS}"),
            at("dp2 tp2", "--zero-stage 3", "CPU optimizer 0.6"),
            at("tp2 pp2", TWO_STAGES, "all on the CPU"),
            at("tp2 cp2", f"{GATHER} --zero-stage 3 {TWOS}"),
        ],
    ),
    "lion": Family(
        LION_WORDS,
        [
            at("dp4", "--zero-stage 3", "CPU optimizer 0.6"),
            at("dp2 tp2", f"--zero-stage 1 {SPLIT_TOKENS}"),
            at("dp2 pp2", "--zero-stage 2", "all on the CPU"),
        ],
    ),
    "moments in 8 bits": Family(
        [*FEWER_SAMPLES, "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"],
        [at("dp2 tp2", "--zero-stage 1"), at("dp4", "--zero-stage 3", "CPU optimizer 0.6")],
        saved=2,
        steps=3,
    ),
    "rounded moments": Family(
        [*FEWER_SAMPLES, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
        [at("dp2 tp2", "--zero-stage 1", "CPU optimizer 0.6"), at("dp2 pp2", "--zero-stage 3")],
        saved=2,
        steps=3,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.fast] * (name == "two processes")) for name in FAMILIES]
)
def test_layouts_equal_one_process(name: str, tmp_path: Path, ranks: Pools) -> None:
    assert_equals_one_process(FAMILIES[name], tmp_path, ranks)


def test_in_bf16_the_host_s_gradients_are_the_device_s() -> None:
    """Sums travel as wide as they are; a parameter that is cut between the two has its gradient in one piece."""
    words, found = [*SMALL.split(), "--bf16"], []
    for flags in ((), VARIANTS["CPU optimizer 0.6"], VARIANTS["all on the CPU"]):
        run = CaseRun(case_config(words, case(Mesh(), *flags), 1), Topology(Mesh(), 0, torch.device("cpu")))
        run.train(0, 1)
        run.trainer.close()
        found.append(run.outcome.gradients[0])
    on_device, *with_host = found
    for gradients in with_host:
        assert on_device.keys() == gradients.keys()
        for name, gradient in on_device.items():
            assert gradients[name].dtype == gradient.dtype == torch.float32
            assert torch.equal(gradients[name], gradient), name


def test_gradients_that_leave_at_once_equal_those_that_stay() -> None:
    """In one piece of eight samples instead of eight pieces of one."""
    names = [option.name for option in spaces.GRADIENTS_LEAVE]
    alone = run_alone(Family(WORDS, ()))
    alone.train(0, 3)
    alone.trainer.close()
    for this in list(spaces.to_prove(parse_flags(WORDS).flags, 1))[: len(names)]:
        assert this.name in names
        run = CaseRun(case_config(WORDS, this, 1), Topology(Mesh(), 0, torch.device("cpu")))
        run.train(0, 3)
        run.trainer.close()
        assert run.config.offload.gradients_leave_at_once and run.config.batch.micro_batch_size == 8
        assert max(apart(run.outcome, alone.outcome).values()) <= TOLERANCE, this.name
