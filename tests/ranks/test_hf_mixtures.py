"""Mixtures of Hugging Face train as in transformers, on one process and in layouts that divide experts and blocks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.loader import make_micro_batch
from gptpar.exchange.hf_folder import SourcePart
from gptpar.exchange.start_from_hf import start_from_hf, take_model_of_hf
from gptpar.optim.group_ranges import is_matrix
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import DATA, EXPERT, Mesh
from tests.helpers import random_tokens
from tests.spawn import spawn
from tests.unit.exchange.hf_models import save_theirs
from tests.unit.model.test_families import GPT_OSS, NAMES, OLMOE, VOCAB_SIZE

transformers = pytest.importorskip("transformers")

STEPS, SAMPLES, COEFFICIENT, LR, DECAY = 3, 4, 0.05, 1e-3, 0.1
EPS = 1e-6
"""Adam's epsilon; with 1e-8, round-off of their norms in fp32 moved a weight of gpt-oss by 2 % of a step."""
OPTIMIZER = (
    f"--lr {LR} --lr-decay-style constant --clip-grad 0 --weight-decay {DECAY} --adam-beta2 0.95 --adam-eps {EPS} "
)
RUN = (
    f"--micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters {STEPS} --mock-data --eval-iters 0 --fp64 "
    + OPTIMIZER
)
# Theirs sums over the choices of a token, of which ours takes the mean.
BALANCE = (
    f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {COEFFICIENT * OLMOE['num_experts_per_tok']} "
)
TOLERANCE = 1e-5
"""Of numbers that transformers forms in fp32: probabilities of experts, and angles of positions."""


def config_of(folder: Path, flags: str, world_size: int) -> Config:
    parsed = parse_flags(f"--load-hf {folder} {RUN} {flags}".split())
    take_model_of_hf(parsed, str(folder))
    return resolve(parsed, world_size)[0]


class FromFolder(CaseRun):
    """It begins with the folder's weights.

    Attributes:
        read: names of the tensors of the folder that this process has read.
    """

    def __init__(self, config: Config, topology: Topology):
        super().__init__(config, topology)
        self.read: set[str] = set()
        read = SourcePart.read

        def noted(part: SourcePart, *args: Any, **options: Any) -> Any:
            self.read.add(part.theirs)
            return read(part, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SourcePart, "read", noted)
            start_from_hf(Path(config.checkpoint.load_hf or ""), self.trainer.engine.optimizer.parts("weights"), None)
        self.trainer.engine.publish()

    def read_own_experts_alone(self) -> bool:
        read = {int(number) for name in self.read for number in re.findall(r"\.experts\.(\d+)\.", name)}
        share = self.config.model.num_experts // self.topology.mesh.expert
        first = share * self.topology.position(EXPERT)
        return read == set(range(first, first + share))


def evaluated(run: CaseRun) -> float:
    """The loss of other samples after training."""
    tokens = random_tokens(SAMPLES, 16, VOCAB_SIZE, seed=9)
    mesh, rank = run.topology.mesh, run.topology.position(DATA)
    batches = [make_micro_batch(one.numpy(), eod=0) for one in tokens.split(1)[rank :: mesh.data]]
    return run.trainer.evaluate(batches).item()


def train(rank: int, folder: Path, mesh: Mesh, flags: str) -> tuple[Outcome, float, bool]:
    """What was learnt, the loss after that, and whether this process read its own experts alone."""
    run = FromFolder(config_of(folder, flags, mesh.world_size), make_topology(mesh, rank, torch.device("cpu")))
    run.train(0, STEPS)
    loss = evaluated(run)
    run.trainer.close()
    return run.outcome, loss, run.read_own_experts_alone()


def train_theirs(model: Any) -> tuple[list[float], list[dict[str, torch.Tensor]], float]:
    """The same steps with transformers' model: cross entropies, weights by their names, the loss after training."""
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if is_matrix(name, p.dim())], "weight_decay": DECAY},
        {"params": [p for name, p in parameters.items() if not is_matrix(name, p.dim())], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    losses, weights = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB_SIZE, (SAMPLES, 17), generator=generator)
        optimizer.zero_grad()
        losses.append(0.0)
        for sample in tokens.split(1):
            found = model(sample[:, :-1], labels=sample[:, :-1], shift_labels=sample[:, 1:])
            (found.loss / SAMPLES).backward()
            balance = COEFFICIENT * found.aux_loss.item() if model.config.output_router_logits else 0.0
            losses[-1] += (found.loss.item() - balance) / SAMPLES
        optimizer.step()
        weights.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    tokens = random_tokens(SAMPLES, 16, VOCAB_SIZE, seed=9)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
    return losses, weights, torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()


def compare(found: tuple[Outcome, float, bool], config: Config, theirs: Any) -> None:
    losses, weights, last = train_theirs(theirs)
    outcome, ours, _ = found
    assert [step[0] for step in outcome.steps] == pytest.approx(losses, rel=TOLERANCE)
    assert ours == pytest.approx(last, rel=TOLERANCE)
    for after, wanted in zip(outcome.weights, weights, strict=True):
        for name, value in NAMES[theirs.config.model_type](config.model, wanted):
            torch.testing.assert_close(after[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.fast
def test_three_steps_with_a_balance_loss_equal_theirs(tmp_path: Path) -> None:
    """One block and one sequence at a time: there, their loss over all blocks' rows is that of each sequence."""
    fields = {**OLMOE, "num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    theirs = save_theirs(tmp_path / "theirs", fields)
    found = train(0, tmp_path / "theirs", Mesh(), BALANCE)
    assert found[0].steps[0][2] > 0.9 * COEFFICIENT * OLMOE["num_experts_per_tok"]
    compare(found, config_of(tmp_path / "theirs", BALANCE, 1), theirs)


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        pytest.param(OLMOE, Mesh(data=2, pipeline=2, expert=2), id="OLMoE"),
        pytest.param({**GPT_OSS, "num_local_experts": 4}, Mesh(data=2, tensor=2, expert=2), id="gpt-oss"),
    ],
)
def test_three_steps_with_experts_of_several_processes_equal_theirs(
    fields: dict[str, Any], mesh: Mesh, tmp_path: Path
) -> None:
    theirs = save_theirs(tmp_path / "theirs", {**fields, "num_hidden_layers": 2})
    flags = f"--expert-model-parallel-size 2 --zero-stage 1 --pipeline-model-parallel-size {mesh.pipeline} "
    flags += f"--tensor-model-parallel-size {mesh.tensor}"
    found = spawn(train, 4, tmp_path / "theirs", mesh, flags)
    compare(found[0], config_of(tmp_path / "theirs", flags, 4), theirs)
    if fields is OLMOE:  # whose folder has a tensor for each expert
        assert all(read_own_experts_alone for *_, read_own_experts_alone in found)
