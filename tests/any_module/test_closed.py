"""``engine.close()`` gives an ordinary module back, which another ``initialize`` takes."""

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import gptpar
from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import problems
from tests.any_module.harness import Training, worst_of_ranks
from tests.any_module.layouts import covering, each_of
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.reference import Trace

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


def closes(rank: int, setup: Setup, place: str) -> list[str]:
    """What is not as in a module that no engine has seen."""
    training = Training(CASES["mlp"], setup)
    wanted = training.run(0, 2).weights[-1]
    second = said(rank, lambda: gptpar.initialize(model=training.model.blocks, config=setup.config(training.case)))
    with training.engine.gathered() if place == "gathered" else nullcontext():
        training.engine.close()
    model, wrong = training.model, [str(hook) for hook in hooks_of(training.model)]
    wrong += [] if "close()" in second else ["another engine takes a part of the module"]
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or not torch.equal(parameter, wanted[name]):
            wrong.append(name)
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            wrong.append(f"{name} shares memory")
    batch = training.make_batch(0, 0)
    training.case.losses_of(model, batch)[0].backward()
    wrong += [f"{name} has no gradient" for name, p in model.named_parameters() if p.grad is None]
    acts = (lambda: training.engine(batch["x"]), training.optimizer.step, training.engine.step)
    return wrong + ["a closed engine trains" for act in acts if not said(rank, act)]


@pytest.mark.parametrize(
    ("place", "setup"), covering(["between steps", "gathered"], SETUPS[:3]) + covering(["gathered"], SETUPS[3:])
)
def test_closing_leaves_an_ordinary_module_with_whole_weights(bench: Bench, setup: Setup, place: str) -> None:
    assert bench.on_ranks(setup.world, closes, setup, place) == [[]] * setup.world


def replaced(rank: int, setup: Setup) -> tuple[list[str], list[float]]:
    """(what is said of wrong calls, losses of two steps of the former engine and one of the new one)"""
    import gptpar.deepspeed as deepspeed

    model, config = CASES["mlp"].make_model(), setup.config(CASES["mlp"])
    wrong = {**config, "optimizer": {"type": "AdamWrong"}} if rank == setup.world - 1 else config
    foreign = [*model.parameters(), torch.nn.Parameter(torch.zeros(1))]
    another = model if rank else CASES["mlp"].make_model()
    former: Any = deepspeed.initialize(model=model, config=config)[0]
    losses = [loss_of_step(former, setup, 0, rank)]
    told = [
        said(rank, lambda: deepspeed.initialize(model=model, config=wrong)),
        said(rank, lambda: deepspeed.initialize(model=model, config=config, model_parameters=foreign)),
        said(rank, lambda: deepspeed.initialize(model=another, config=config)) if setup.world > 1 else "",
    ]
    losses.append(loss_of_step(former, setup, 1, rank))
    new: Any = deepspeed.initialize(model=model, config=config)[0]
    assert former.is_closed and not new.is_closed
    losses.append(loss_of_step(new, setup, 2, rank))
    new.close()
    return told, losses


def loss_of_step(engine: Any, setup: Setup, step: int, rank: int) -> float:
    (loss,) = CASES["mlp"].losses_of(engine, CASES["mlp"].make_batch(step, 0, rank, setup.world))
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.filterwarnings("ignore:this model has an engine already")
@each_of([Setup(1, 0), Setup(2, 3, 0.6)])
def test_a_former_engine_is_closed_when_all_is_checked(bench: Bench, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, replaced, setup)
    for told, _ in found:
        assert "AdamWrong" in told[0] and "not among the model's parameters" in told[1]
        assert setup.world == 1 or "whether an engine has the model already is False" in told[2]
    means = [sum(some) / len(found) for some in zip(*(losses for _, losses in found), strict=True)]
    assert means == pytest.approx(bench.reference("mlp", setup).losses[:3], rel=1e-10)


def live_bytes() -> int:
    """Of all tensors, each storage once."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in gc.get_objects() if _is_tensor(t)}
    return sum(storage.nbytes() for storage in storages.values())


def _is_tensor(thing: object) -> bool:
    kind = type(thing)
    return issubclass(kind, torch.Tensor) and kind is not FakeTensor and thing.layout == torch.strided  # type: ignore


def left_behind(rank: int, setup: Setup) -> list[int]:
    """Bytes of tensors after each of some engines, though these are still referred to."""
    model, kept, found = CASES["mlp"].make_model(), [], []
    for _ in range(3):
        made = gptpar.initialize(model=model, config=setup.config(CASES["mlp"]))[0]
        made.backward(made(torch.ones(2, 16, dtype=torch.float64)).square().mean())
        made.step()
        made.close()
        kept.append(made)
        time.sleep(0.2)  # threads of gloo let go of what they have sent a moment later
        found.append(live_bytes())
    return found


@each_of([Setup(1, 0, 1.0), Setup(2, 3, 0.6)])
def test_a_closed_engine_holds_no_memory(bench: Bench, setup: Setup) -> None:
    model = sum(parameter.nbytes for parameter in CASES["mlp"].make_model().parameters())
    for found in bench.on_ranks(setup.world, left_behind, setup):
        assert found[2] - found[0] < model / 10


def test_closing_while_an_error_is_on_its_way_waits_for_nobody(bench: Bench) -> None:
    try:
        assert bench.on_ranks(2, closes_alone, Setup(2, 3, 0.6)) == [False, True]
    finally:
        bench.close(keep=1)


def closes_alone(rank: int, setup: Setup) -> bool:
    """The second process closes amid an error; the first one does nothing of the kind."""
    training = Training(CASES["mlp"], setup)
    training.run(0, 1)
    if rank == 0:
        return False
    try:
        raise ValueError
    except ValueError:
        training.engine.close()
    return True


def compiled(rank: int, setup: Setup) -> Trace:
    """Compiled blocks are as they were, and the module trains on."""
    case = CASES["mlp"]
    model = case.make_model()
    gptpar.initialize(model=model, config={**setup.config(case), "gptpar": {"compile": True}})[0].close()
    assert not hooks_of(model)
    training = Training(replace(case, build=lambda: model), setup)
    trace = training.run(0, setup.steps)
    training.engine.close()
    return trace


def test_closing_takes_compiled_forwards_away(bench: Bench) -> None:
    setup = Setup(steps=3)
    traces = bench.on_ranks(1, compiled, setup)
    assert not problems(worst_of_ranks(traces, bench.reference("mlp", setup)), 1e-10)
