"""What cannot be right is refused with a sentence, on every rank; nothing hangs, nothing is wrong in silence."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptpar.adapter.guards import failed_passes
from gptpar.errors import GptparError
from tests.any_module.case import Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import problems
from tests.any_module.harness import Training, worst_of_ranks
from tests.any_module.layouts import each_of
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.reference import Trace, reference
from tests.any_module.zoo import Mlp
from tests.spawn import RanksFailed

SETUPS = [Setup(1, 0, accumulation=2), Setup(1, 3, 0.6, 2), Setup(2, 3, 0.6, 2)]


@pytest.fixture
def new_ranks(bench: Bench) -> Iterator[Bench]:
    """Processes that end after the test: a refused step may leave several of them anywhere."""
    yield bench
    bench.close(keep=1)


# Acts that an engine in training does not allow; each goes on to a step, in which it has to be told at last.


def begin(setup: Setup, name: str = "mlp") -> Training:
    """After two good steps: the engine has seen how the model behaves."""
    training = Training(CASES[name], setup)
    training.run(0, 2)
    return training


def finish(training: Training, first: int = 0) -> None:
    """The rest of the third step."""
    for micro in range(first, training.setup.accumulation):
        training.engine.backward(training.loss_of(2, micro))
        training.engine.step()


def graph_of_the_gradient(setup: Setup) -> None:
    training = begin(setup)
    training.engine.backward(training.loss_of(2), create_graph=True)
    finish(training)


def graph_of_the_gradient_outside(setup: Setup) -> None:
    training = begin(setup)
    training.loss_of(2).backward(create_graph=True)
    finish(training)


def frozen_or_thawed_during_accumulation(setup: Setup, trains: bool) -> None:
    training = begin(setup, "frozen_block" if trains else "mlp")
    training.engine.backward(training.loss_of(2))
    training.engine.step()
    training.model.blocks[1].up.requires_grad_(trains)
    finish(training, 1)


frozen = partial(frozen_or_thawed_during_accumulation, trains=False)
thawed = partial(frozen_or_thawed_during_accumulation, trains=True)
ACTS: dict[Callable[[Setup], None], str] = {
    graph_of_the_gradient: "create_graph",
    graph_of_the_gradient_outside: "create_graph|engine.backward",
    frozen: "requires_grad.*blocks.1.up|blocks.1.up.*requires_grad",
    thawed: "requires_grad.*blocks.1|blocks.1.*requires_grad",
}


def assert_told(found: list[list[str]], sentences: Iterable[str]) -> None:
    """Every rank says these sentences."""
    for told in found:
        for text, sentence in zip(told, sentences, strict=True):
            assert re.search(sentence, text, re.DOTALL), told


def in_training(rank: int, setup: Setup) -> list[str]:
    return [said(rank, act, setup) for act in ACTS]


@each_of(SETUPS)
def test_in_training(new_ranks: Bench, setup: Setup) -> None:
    assert_told(new_ranks.on_ranks(setup.world, in_training, setup), ACTS.values())


# Models that initialize does not take.


class Inside(Mlp):
    """DistributedDataParallel within."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = DistributedDataParallel(self.blocks[1])


def renormalising() -> nn.Module:
    model = Mlp()
    model.table = nn.Embedding(4, 4, max_norm=1.0)
    return model


MODELS: dict[Callable[[], nn.Module], str] = {
    lambda: DistributedDataParallel(Mlp()): "DistributedDataParallel",
    Inside: "blocks.1.*DistributedDataParallel",
    renormalising: "table has max_norm.*None",
    lambda: torch.jit.script(Mlp()): "ScriptModule.*before scripting",
}


def at_initialize(rank: int, setup: Setup) -> list[str]:
    return [said(rank, Training, Case("refused", build), setup) for build in MODELS]


@each_of([Setup(1, 0), Setup(2, 3, 0.6)])
def test_at_initialize(bench: Bench, setup: Setup) -> None:
    assert_told(bench.on_ranks(setup.world, at_initialize, setup), MODELS.values())


# Ranks that do different things: each says so, in time.


def by_rank(model: Any, batch: dict[str, Any], orders: list[list[int]]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], orders[dist.get_rank() if batch["step"] == 1 else 0]), batch["y"])


def other_orders(setup: Setup, orders: list[list[int]]) -> None:
    """The ranks agree in the first step, and run other blocks, or others first, in the second."""
    case = CASES["changing_order"]
    training = Training(replace(case, loss=lambda model, batch: by_rank(model, batch, orders)), setup)
    with suppress(RuntimeError):  # gloo's own words, where a peer has given up already, are no sentence of ours
        training.run(0, 3)


@pytest.mark.parametrize(
    "orders",
    [[[0, 1, 2], [0, 2, 1]], [[0, 1, 2], [0, 1]], [[0, 1, 2], [0, 1, 2, 1]]],
    ids=["another order", "one block less", "one block twice"],
)
def test_ranks_that_run_different_blocks(new_ranks: Bench, orders: list[list[int]]) -> None:
    found = new_ranks.on_ranks(2, said, other_orders, Setup(2, 3, 0.6), orders)
    assert all(re.search(r"(?=.*rank)(?=.*blocks\.[12])", told, re.DOTALL) for told in found), found


class FailsAlone(Training):
    """An error on the last process alone, which goes on with the same micro-batch; the model's passes fail so."""

    failing_in = "forward"

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) == (2, 0) and self.rank == self.setup.world - 1:
            with self.model.expected(self.failing_in, torch.OutOfMemoryError):
                self.engine.backward(self.loss_of(step, micro))


class BackwardFailsAlone(FailsAlone):
    failing_in = "backward"


def fails_alone(rank: int, kind: type[Training], setup: Setup) -> None:
    with patch.object(failed_passes, "WAIT_SECONDS", 0.5):
        kind(CASES["exception_in_forward"], setup).run(0, 4)


@pytest.mark.parametrize(
    ("kind", "setup"),
    [(FailsAlone, Setup(2, 2, 0.0, 2, steps=4)), (BackwardFailsAlone, Setup(2, 1, 0.0, 2, steps=4))],
    ids=["forward without gathering", "backward without exchange"],
)
def test_an_error_of_one_process_is_forgotten_where_no_other_waits_for_it(
    bench: Bench, kind: type[Training], setup: Setup
) -> None:
    bench.check("exception_in_forward", setup, kind)


def test_a_forward_pass_that_fails_on_one_process_is_told_on_all(new_ranks: Bench) -> None:
    with pytest.raises(RanksFailed) as caught:
        new_ranks.on_ranks(2, fails_alone, FailsAlone, Setup(2, 3, 0.0, 2))
    assert re.search("rank 1 (ended|met an error in) a forward pass of step 3, micro-batch 1", caught.value.reports[1])


def test_a_backward_pass_that_fails_on_one_process_is_told(new_ranks: Bench) -> None:
    with pytest.raises(RanksFailed) as caught:
        new_ranks.on_ranks(2, fails_alone, BackwardFailsAlone, Setup(2, 2, 0.0, 2))
    told = "rank 0 told of none within 0.5 seconds, rank 1 met an error in a backward pass of step 3, micro-batch 1"
    assert told in caught.value.reports[1]


def other_models(setup: Setup) -> None:
    """A rank has a block more."""
    blocks = 2 + (dist.get_rank() == 1)
    Training(Case("other", lambda: Mlp(blocks=blocks)), setup)


def test_ranks_with_different_models(new_ranks: Bench) -> None:
    assert all("rank" in told for told in new_ranks.on_ranks(2, said, other_models, Setup(2, 3)))


# Either right, or refused with the parameter's name.


class ReadsAnotherBlock(Mlp):
    """A block multiplies by the matrix of another one, which nobody has declared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] + self._part(args[0]),))

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.blocks[0].up.weight)[..., : x.shape[-1]]


class KeepsAView(Mlp):
    """A view of a parameter is kept over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.blocks[0].up.weight[:16]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(x, self.kept[0].detach())


class PenaltyOfAll(Mlp):
    """The root sums the squares of all parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().forward(x) + 0.01 * penalty


class GradientsPerSample(Mlp):
    """torch.func within the forward; it permits no hooks on saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: p.detach() for name, p in self.last.named_parameters()}
        slope = torch.func.grad(lambda w, one: torch.func.functional_call(self.last, w, (one,)).square().sum())
        return super().forward(x) + torch.func.vmap(slope, (None, 0))(weights, x)["bias"]


EITHER = {
    Case("reads_another_block", ReadsAnotherBlock): r"blocks\.0\.up\.weight",
    Case("keeps_a_view", KeepsAView): "blocks.0|view",
    Case("gradients_per_sample", GradientsPerSample): "torch.func.*ZeRO stage 2",
    Case("penalty_of_all", PenaltyOfAll): r"blocks\.\d\.\w+\.(weight|bias)",
}


def traces_or_told(rank: int, setup: Setup) -> list[Trace | str]:
    """What the engine gives for each model, or what it says instead."""
    found: list[Trace | str] = []
    for case in EITHER:
        try:
            training = Training(case, setup)
            found.append(training.run(0, setup.steps))
            training.engine.close()
        except GptparError as error:
            found.append(str(error))
    return found


@each_of([Setup(1, 0, 0.0, 2, steps=4), Setup(1, 3, 0.6, 3, steps=4), Setup(2, 3, 0.6, steps=4)])
def test_right_or_refused(new_ranks: Bench, setup: Setup) -> None:
    answers = zip(*new_ranks.on_ranks(setup.world, traces_or_told, setup), strict=True)
    for found, (case, sentence) in zip(answers, EITHER.items(), strict=True):
        if any(isinstance(one, str) for one in found):
            assert all(isinstance(one, str) and re.search(sentence, one) for one in found), found
        else:
            bad = problems(worst_of_ranks(found, reference(case, setup)), 1e-10)
            assert not bad, (case.name, bad)
