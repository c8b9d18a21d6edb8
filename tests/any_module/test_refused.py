"""What cannot be right is refused with a sentence, on every rank; nothing hangs, nothing is wrong in silence."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
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
from tests.any_module.harness import GPTPAR, Training, initializer, worst_of_ranks
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.reference import Trace, reference
from tests.any_module.scenarios.failing import loss_of
from tests.any_module.zoo import Mlp
from tests.spawn import RanksFailed

SETUPS = [Setup(1, 0, accumulation=2), Setup(1, 3, 0.6, 2), Setup(2, 3, 0.6, 2)]
layouts = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))


@pytest.fixture
def new_ranks(bench: Bench) -> Iterator[Bench]:
    """Processes that end after the test: a refused step may leave several of them anywhere."""
    yield bench
    bench.close(keep=1)


# Acts that an engine in training does not allow; each goes on to a step, in which it has to be told at last.


def begin(setup: Setup, name: str = "mlp") -> Training:
    """After two good steps: the engine has seen how the model behaves."""
    training = Training(CASES[name], setup, GPTPAR)
    training.run(0, 2)
    return training


def forward(training: Training, micro: int = 0) -> torch.Tensor:
    """Of the third step."""
    return training.case.losses_of(training.engine, training.make_batch(2, micro))[0]


def finish(training: Training, first: int = 0) -> None:
    """The rest of the step."""
    for micro in range(first, training.setup.accumulation):
        training.engine.backward(forward(training, micro))
        training.engine.step()


def graph_of_the_gradient(setup: Setup) -> None:
    training = begin(setup)
    training.engine.backward(forward(training), create_graph=True)
    finish(training)


def graph_of_the_gradient_outside(setup: Setup) -> None:
    training = begin(setup)
    forward(training).backward(create_graph=True)
    finish(training)


def frozen_during_accumulation(setup: Setup) -> None:
    training = begin(setup)
    training.engine.backward(forward(training))
    training.engine.step()
    training.model.blocks[1].up.weight.requires_grad_(False)
    finish(training, 1)


def thawed_during_accumulation(setup: Setup) -> None:
    training = begin(setup, "frozen_block")
    training.engine.backward(forward(training))
    training.engine.step()
    training.model.blocks[1].requires_grad_(True)
    finish(training, 1)


ACTS: dict[Callable[[Setup], None], str] = {
    graph_of_the_gradient: "create_graph",
    graph_of_the_gradient_outside: "create_graph|engine.backward",
    frozen_during_accumulation: "requires_grad.*blocks.1.up.weight|blocks.1.up.weight.*requires_grad",
    thawed_during_accumulation: "requires_grad.*blocks.1|blocks.1.*requires_grad",
}


def assert_told(bench: Bench, setup: Setup, sentence: str, act: Callable[..., None], *args: Any) -> None:
    """Every rank says so."""
    found = bench.on_ranks(setup.world, said, act, *args)
    assert all(re.search(sentence, text, re.DOTALL) for text in found), found


@layouts
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_in_training(new_ranks: Bench, act: Callable[[Setup], None], setup: Setup) -> None:
    assert_told(new_ranks, setup, ACTS[act], act, setup)


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


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ddp": (lambda: DistributedDataParallel(Mlp()), "DistributedDataParallel"),
    "ddp_inside": (Inside, "blocks.1.*DistributedDataParallel"),
    "max_norm": (renormalising, "table has max_norm.*None"),
    "scripted": (lambda: torch.jit.script(Mlp()), "ScriptModule.*before scripting"),
}


def initialize_model(name: str, setup: Setup) -> None:
    Training(Case(name, MODELS[name][0]), setup, GPTPAR)


@pytest.mark.parametrize(("name", "setup"), [*((name, SETUPS[0]) for name in MODELS), ("ddp_inside", SETUPS[2])])
def test_at_initialize(bench: Bench, name: str, setup: Setup) -> None:
    assert_told(bench, setup, MODELS[name][1], initialize_model, name, setup)


def other_optimizer(setup: Setup) -> None:
    model = Mlp()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    case = replace(CASES["mlp"], client=True)
    initializer(GPTPAR)(model=model, optimizer=optimizer, config=setup.config(case))


def test_an_optimizer_that_is_none_of_ours(bench: Bench) -> None:
    assert_told(bench, SETUPS[0], "Rprop", other_optimizer, SETUPS[0])


# Ranks that do different things: each says so, in time.


def by_rank(model: Any, batch: dict[str, Any], orders: list[list[int]]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], orders[dist.get_rank() if batch["step"] == 1 else 0]), batch["y"])


def other_orders(setup: Setup, orders: list[list[int]]) -> None:
    """The ranks agree in the first step, and run other blocks, or others first, in the second."""
    case = CASES["changing_order"]
    training = Training(replace(case, loss=lambda model, batch: by_rank(model, batch, orders)), setup, GPTPAR)
    with suppress(RuntimeError):  # gloo's own words, where a peer has given up already, are no sentence of ours
        training.run(0, 3)


@pytest.mark.parametrize(
    "orders",
    [[[0, 1, 2], [0, 2, 1]], [[0, 1, 2], [0, 1]], [[0, 1, 2], [0, 1, 2, 1]]],
    ids=["another order", "one block less", "one block twice"],
)
def test_ranks_that_run_different_blocks(new_ranks: Bench, orders: list[list[int]]) -> None:
    setup = Setup(2, 3, 0.6)
    assert_told(new_ranks, setup, r"(?=.*rank)(?=.*blocks\.[12])", other_orders, setup, orders)


class FailsAlone(Training):
    """An error on the last process alone, which goes on with the same micro-batch; the model's passes fail so."""

    failing_in = "forward"

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) == (2, 0) and self.rank == self.setup.world - 1:
            with self.model.expected(self.failing_in, torch.OutOfMemoryError):
                self.engine.backward(loss_of(self.engine, self.make_batch(step, micro)))


class BackwardFailsAlone(FailsAlone):
    failing_in = "backward"


def fails_alone(rank: int, kind: type[Training], setup: Setup) -> None:
    with patch.object(failed_passes, "WAIT_SECONDS", 0.5):
        kind(CASES["exception_in_forward"], setup, GPTPAR).run(0, 4)


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
    Training(Case("other", lambda: Mlp(blocks=blocks)), setup, GPTPAR)


def test_ranks_with_different_models(new_ranks: Bench) -> None:
    setup = Setup(2, 3)
    assert_told(new_ranks, setup, "rank", other_models, setup)


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
    "reads_another_block": (Case("reads_another_block", ReadsAnotherBlock), r"blocks\.0\.up\.weight"),
    "keeps_a_view": (Case("keeps_a_view", KeepsAView), "blocks.0|view"),
    "gradients_per_sample": (Case("gradients_per_sample", GradientsPerSample), "torch.func.*ZeRO stage 2"),
    "penalty_of_all": (Case("penalty_of_all", PenaltyOfAll), r"blocks\.\d\.\w+\.(weight|bias)"),
}


def trace_or_told(rank: int, name: str, setup: Setup) -> Trace | str:
    """What the engine gives, or what it says instead."""
    try:
        case = EITHER[name][0]
        training = (case.training or Training)(case, setup, GPTPAR)
        trace = training.run(0, setup.steps)
        training.engine.close()
        return trace
    except GptparError as error:
        return str(error)


@pytest.mark.parametrize(("setup", "accumulation"), [(SETUPS[0], 2), (SETUPS[1], 3), (SETUPS[2], 1)])
@pytest.mark.parametrize("name", EITHER)
def test_right_or_refused(new_ranks: Bench, name: str, setup: Setup, accumulation: int) -> None:
    setup = replace(setup, steps=4, accumulation=accumulation)
    case, sentence = EITHER[name]
    found = new_ranks.on_ranks(setup.world, trace_or_told, name, setup)
    if any(isinstance(one, str) for one in found):
        assert all(isinstance(one, str) and re.search(sentence, one) for one in found), found
    else:
        bad = problems(worst_of_ranks(found, reference(case, setup)), 1e-10)
        assert not bad, bad
