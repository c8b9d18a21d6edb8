"""``engine.close()`` gives an ordinary module back, which another ``initialize`` takes."""

import gc
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.errors import GptparError
from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import problems
from tests.any_module.harness import GPTPAR, Training, initializer, worst_of_ranks
from tests.any_module.layouts import covering
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.reference import Trace, reference

SETUPS = [Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 1), Setup(2, 2, 0.6, 2), Setup(2, 3), Setup(2, 3, 0.6, 2)]


def hooks_of(module: nn.Module) -> list[Any]:
    """Everything that is called by itself."""
    found: list[Any] = []
    for one in module.modules():
        found += [value for name, value in vars(one).items() if "hook" in name and value]
        found += [one.forward] if "forward" in vars(one) else []
    for parameter in module.parameters():
        found += [hooks for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if hooks]
    return found


def closes(rank: int, setup: Setup, engine: str, place: str) -> list[str]:
    """What is not as in a module that no engine has seen."""
    training = Training(CASES["mlp"], setup, engine)
    wanted = training.run(0, 2).weights[-1]
    with training.engine.gathered() if place == "gathered" else nullcontext():
        training.engine.close()
    model, wrong = training.model, [str(hook) for hook in hooks_of(training.model)]
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or not torch.equal(parameter, wanted[name]):
            wrong.append(name)
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            wrong.append(f"{name} shares memory")
    batch = training.make_batch(0, 0)
    training.case.losses_of(model, batch)[0].backward()
    wrong += [f"{name} has no gradient" for name, p in model.named_parameters() if p.grad is None]
    for act in (lambda: training.engine(batch["x"]), training.optimizer.step, training.engine.step):
        with suppress(GptparError):
            act()
            wrong.append("a closed engine trains")
    return wrong


@pytest.mark.parametrize(
    ("place", "setup"), covering(["between steps", "gathered"], SETUPS[:3]) + covering(["gathered"], SETUPS[3:])
)
def test_closing_leaves_an_ordinary_module_with_whole_weights(bench: Bench, setup: Setup, place: str) -> None:
    assert bench.on_ranks(setup.world, closes, setup, bench.engine, place) == [[]] * setup.world


@pytest.mark.parametrize("setup", SETUPS[1::2], ids=str)
def test_a_module_trains_in_another_engine_after_the_first_is_closed(bench: Bench, setup: Setup) -> None:
    bench.check("trained_on_in_another_engine", replace(setup, steps=4))


def twice(rank: int, setup: Setup, engine: str) -> str:
    training = Training(CASES["mlp"], setup, engine)
    told = said(rank, lambda: initializer(engine)(model=training.model.blocks, config=setup.config(CASES["mlp"])))
    training.engine.close()
    return told


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[-1]], ids=str)
def test_a_module_of_a_living_engine_is_refused(bench: Bench, setup: Setup) -> None:
    assert all("close()" in told for told in bench.on_ranks(setup.world, twice, setup, bench.engine))


def live_bytes() -> int:
    """Of all tensors, each storage once."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in gc.get_objects() if _is_tensor(t)}
    return sum(storage.nbytes() for storage in storages.values())


def _is_tensor(thing: object) -> bool:
    return issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided  # type: ignore[attr-defined]


def left_behind(rank: int, setup: Setup, engine: str) -> list[int]:
    """Bytes of tensors after each of some engines, though these are still referred to."""
    model, kept, found = CASES["mlp"].make_model(), [], []
    for _ in range(3):
        made = initializer(engine)(model=model, config=setup.config(CASES["mlp"]))[0]
        made.backward(model_loss(made))
        made.step()
        made.close()
        kept.append(made)
        time.sleep(0.2)  # threads of gloo let go of what they have sent a moment later
        found.append(live_bytes())
    return found


def model_loss(model: Any) -> torch.Tensor:
    return model(torch.ones(2, 16, dtype=torch.float64)).square().mean()


@pytest.mark.parametrize("setup", [SETUPS[1], SETUPS[5]], ids=str)
def test_a_closed_engine_holds_no_memory(bench: Bench, setup: Setup) -> None:
    setup = replace(setup, accumulation=1)
    model = sum(parameter.nbytes for parameter in CASES["mlp"].make_model().parameters())
    for found in bench.on_ranks(setup.world, left_behind, setup, bench.engine):
        assert found[2] - found[0] < model / 10


def test_closing_while_an_error_is_on_its_way_waits_for_nobody(bench: Bench) -> None:
    try:
        assert bench.on_ranks(2, closes_alone, Setup(2, 3, 0.6)) == [False, True]
    finally:
        bench.close(keep=1)


def closes_alone(rank: int, setup: Setup) -> bool:
    """The second process closes amid an error; the first one does nothing of the kind."""
    training = Training(CASES["mlp"], setup, GPTPAR)
    training.run(0, 1)
    if rank == 0:
        return False
    try:
        raise ValueError
    except ValueError:
        training.engine.close()
    return True


def compiled(rank: int, setup: Setup, engine: str) -> Trace:
    """Compiled blocks are as they were, and the module trains on."""
    case = CASES["mlp"]
    model = case.make_model()
    config = {**setup.config(case), "gptpar": {"compile": True}}
    initializer(engine)(model=model, config=config)[0].close()
    assert not hooks_of(model)
    training = Training(replace(case, build=lambda: model), setup, engine)
    trace = training.run(0, setup.steps)
    training.engine.close()
    return trace


def test_closing_takes_compiled_forwards_away(bench: Bench) -> None:
    setup = replace(SETUPS[0], steps=3)
    traces = bench.on_ranks(1, compiled, setup, bench.engine)
    assert not problems(worst_of_ranks(traces, reference(CASES["mlp"], setup)), 1e-10)
