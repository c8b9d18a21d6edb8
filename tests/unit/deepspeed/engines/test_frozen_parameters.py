"""Parameters that are frozen and trained again while an engine has them, beside torch's own optimizers."""

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.errors import GptparError
from tests.unit.adapter.beside_torch import assert_close, batch, engine_of, in_plain_torch, loss_of, network

STEPS = 10
FROZEN = {"0.weight": range(0, 4), "0.bias": range(2, 7), "2.weight": (5,), "2.bias": range(5, 8)}
"""Parameter -> steps in which it is frozen: a whole group in steps 2, 3 and 5."""
Freeze = Callable[[nn.Sequential, int], None]
KINDS_AND_RATIOS = [
    *((name, 0.6) for name in ("AdamW", "AMSGrad, L2", "momentum", "Adagrad", "RMSprop, all")),
    *(("AdamW", ratio) for ratio in (0.0, 1.0)),
]
FAST = ("AdamW", 0.6), ("RMSprop, all", 0.6)


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 3e-2}]


def freeze(model: nn.Sequential, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step not in FROZEN[name])


def train(engine: Any, start: int, stop: int, by_batch: bool, freeze: Freeze = freeze) -> None:
    for step in range(start, stop):
        freeze(engine.module, step)
        if by_batch:
            engine._work._loss_fn = lambda output, batch: output.square().mean()
            engine.train_batch(iter([batch(step)]))
        else:
            engine.backward(loss_of(engine, step))
            engine.step()


@pytest.mark.parametrize(
    ("name", "ratio"),
    [pytest.param(*both, marks=() if both in FAST else pytest.mark.slow) for both in KINDS_AND_RATIOS],
)
def test_frozen_parameters_miss_steps_as_in_torch(tmp_path: Path, name: str, ratio: float) -> None:
    """An engine of another ratio goes on while parameters are frozen."""
    first, second = engine_of(name, ratio, groups_of), engine_of(name, 0.3, groups_of)
    second.save_checkpoint(tmp_path / "fresh")
    train(second, 0, 2, by_batch=False)  # misses two steps, of which it knows nothing after the loads
    train(first, 0, 3, by_batch=ratio == 1.0)
    first.save_checkpoint(tmp_path / "three")
    second.load_checkpoint(tmp_path / "fresh")
    assert second._frozen.missed == {}
    second.load_checkpoint(tmp_path / "three")
    assert second._frozen.missed == {"0.weight": 3, "0.bias": 1}
    train(second, 3, STEPS, by_batch=ratio == 0.0)
    first.close()
    second.close()
    assert_close(second.module.parameters(), in_plain_torch(name, groups_of, STEPS, freeze))


def test_parameters_frozen_in_turns_miss_steps_as_in_torch() -> None:
    """Other groups of the engine may have missed as many steps as the former ones, one by one."""

    def freeze(model: nn.Sequential, step: int) -> None:
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(step % 5 != place + 1)

    engine = engine_of("AdamW", 0.6)
    train(engine, 0, 3, by_batch=False, freeze=freeze)
    freeze(engine.module, 3)
    engine.backward(loss_of(engine, 3) * math.inf)
    engine.step()  # is skipped, so that nobody misses it
    train(engine, 3, STEPS, by_batch=False, freeze=freeze)
    engine.close()
    assert_close(engine.module.parameters(), in_plain_torch("AdamW", nn.Module.parameters, STEPS, freeze))


@pytest.mark.parametrize("by_batch", [True, False])
def test_numbers_that_are_read_late_count_the_steps_of_those_frozen_then(by_batch: bool) -> None:
    """A GPU's engine reads a step's numbers in the next step."""
    engine = engine_of("AdamW", 0.6, groups_of)
    update = engine.optimizer._update

    def update_alone() -> None:
        engine._take_note_of_last_step = lambda: None
        update()
        del engine._take_note_of_last_step

    def freeze(model: nn.Sequential, step: int) -> None:
        model[0].weight.requires_grad_(step not in (2, 3, 6))  # nobody is frozen before

    engine.optimizer._update = update_alone
    train(engine, 0, STEPS, by_batch, freeze)
    engine.close()
    assert_close(engine.module.parameters(), in_plain_torch("AdamW", groups_of, STEPS, freeze))


def test_what_cannot_be_frozen_or_trained() -> None:
    model = network()
    model[2].bias.requires_grad_(False)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    engine: Any = gptpar.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    before = [p.detach().clone() for p in model.parameters()]
    model[2].bias.requires_grad_(True)
    with pytest.raises(GptparError, match=r"requires_grad of 2.bias was set after gptpar.*freeze parameters that"):
        engine(torch.zeros(4, 5, dtype=torch.float64))
    model[2].bias.requires_grad_(False)
    engine.backward(loss_of(engine, 0))
    model[0].requires_grad_(False)
    with pytest.raises(GptparError, match=r"requires_grad of 2 parameters, 0\.bias among them, was changed within a"):
        engine.step()
    model[0].requires_grad_(True)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    engine.step()
    assert engine.global_steps == 1 and not torch.equal(model[0].weight, before[0])
    engine.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_unused_parameters_are_told_if_they_may_not_be(stage: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)}).double()
    model.forward = lambda x, name: model[name](x)  # type: ignore[method-assign]
    zero = {"zero_optimization": {"stage": stage, "ignore_unused_parameters": False}}
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}, **zero}
    groups = [{"params": list(model[name].parameters())} for name in "ab"]
    engine: Any = gptpar.initialize(model=model, config=config, model_parameters=groups)[0]
    x = torch.ones(4, 5, dtype=torch.float64)
    told = r"2 parameters had no gradient .*\(b.bias, b.weight\), 2 on all"
    for name in "aba":
        engine.backward(engine(x, name).square().mean())
        engine.step()
    engine.backward(engine(x, "a").square().mean())
    with pytest.raises(AssertionError, match=told):
        engine.step()
    engine.zero_grad()
    assert engine.global_steps == 1
    model["b"].requires_grad_(False)
    for _ in range(2):
        engine.backward(engine(x, "a").square().mean())
        engine.step()
    assert engine.global_steps == 2
    engine.close()


@pytest.mark.parametrize(("stage", "ratio"), [(0, None), (2, 0.6)])
def test_a_parameter_without_moments_in_a_checkpoint_begins_its_corrections_anew(
    stage: int, ratio: float | None, tmp_path: Path
) -> None:
    """A new head's first change is the whole rate, as in torch."""

    def made(has_head: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(body=nn.Linear(6, 6), head=nn.Linear(6, 3) if has_head else nn.Tanh()))
        offload = {} if ratio is None else {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, **offload},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-12)
        return gptpar.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(engine: Any, steps: int) -> None:
        for step in range(steps):
            engine.backward(engine(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean())
            engine.step()

    before, after = made(False), made(True)
    train(before, 10)
    before.save_checkpoint(tmp_path)
    before.close()
    after.load_checkpoint(tmp_path, load_module_strict=False)
    with after.gathered():
        old = after.module.head.weight.detach().clone()
    train(after, 1)
    with after.gathered():
        change = (after.module.head.weight.detach() - old).abs()
    assert torch.allclose(change, torch.full((3, 6), 1e-2), rtol=1e-4, atol=0)
    after.close()
