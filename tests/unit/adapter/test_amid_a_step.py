"""What the user changes amid a step, beside plain torch: gradients, their norm, weights and moments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gptpar
from gptpar.errors import GptparError
from tests.pairs import every_pair
from tests.unit.adapter.beside_torch import KINDS, assert_close, batch, engine_of, loss_of, network

Edit = Callable[[nn.Module], None]


class Network(nn.Module):
    """Uses ``rare`` in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.usual, self.rare = nn.Linear(5, 5), nn.Linear(5, 5)
        self.double()

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        y: torch.Tensor = self.usual(x)
        return self.rare(y.tanh()) if uses_rare else y


def gives_other_memory(model: Any) -> None:
    model.usual.weight.grad.data = 3 * model.usual.weight.grad


def sets_other_memory(model: Any) -> None:
    model.usual.weight.grad.set_(torch.full_like(model.usual.weight, 0.1))


def decays_by_hand(model: Any) -> None:
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = grad + 0.1 * parameter.detach()


def gives_to_a_rare_one(model: Any) -> None:
    model.rare.bias.grad = torch.full_like(model.rare.bias, 0.1)


@pytest.mark.parametrize("edit", [gives_other_memory, sets_other_memory, decays_by_hand, gives_to_a_rare_one])
@pytest.mark.parametrize(("accumulates", "uses_rare"), [(1, 9), (2, 9), (2, 2), (1, 2)])
def test_gradients_of_the_user_count_as_in_torch(edit: Edit, accumulates: int, uses_rare: int) -> None:
    """Micro-batches whose number is divisible by ``uses_rare``, but for the first, use the rare layer."""
    model, other = Network(), Network()
    config = {"train_batch_size": 4 * accumulates, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    clients, optimizer = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (model, other))
    engine: Any = gptpar.initialize(model=model, config=config, optimizer=clients)[0]
    for place in range(5 * accumulates):
        used = place > 0 and place % uses_rare == 0
        engine.backward(engine(batch(place), used).square().mean())
        (other(batch(place), used).square().mean() / accumulates).backward()
        for (name, one), plain in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (plain.grad is None), name
            assert one.grad is None or torch.allclose(one.grad, plain.grad, rtol=0, atol=1e-13), name
        edit(model)
        edit(other)
        if engine.is_gradient_accumulation_boundary():
            for plain in other.parameters():  # an engine's parameter without a gradient has one of zero
                plain.grad = torch.zeros_like(plain) if plain.grad is None else plain.grad
            optimizer.step()
            optimizer.zero_grad()
        engine.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.close()
    assert_close(model.parameters(), other.parameters(), atol=1e-13)


# --- clipping -------------------------------------------------------------------------------------------------------


UNCLIPPED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def after_backward(section: dict[str, Any], model: nn.Module) -> Any:
    engine = gptpar.initialize(model=model, config=UNCLIPPED | section)[0]
    backward(engine)
    return engine


def backward(engine: Any) -> None:
    inputs = torch.ones(4, 4, dtype=engine.module.weight.dtype)
    for number in range(engine.gradient_accumulation_steps()):
        if number:
            engine.step()
        engine.backward(engine(inputs).square().sum() * 100)


@pytest.mark.parametrize(
    "section",
    [
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3}},
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    ],
)
def test_clipping_is_refused_where_it_would_change_nothing(section: dict[str, Any]) -> None:
    """Also of a list that was made beforehand, which knows no engine; the engine goes on afterwards."""
    model, plain = linear(), linear()
    parameters = list(model.parameters())
    engine, untouched = after_backward(section, model), after_backward(section, plain)
    trained = filter(lambda p: p.requires_grad, engine.parameters())
    for clip in (
        lambda: clip_grad_norm_(engine.parameters(), 0.1),
        lambda: clip_grad_norm_(parameters, 0.1),
        lambda: clip_grad_value_(trained, 0.1),
    ):
        with pytest.raises(GptparError, match="would change nothing: .* Set gradient_clipping in the configuration"):
            clip()
    model.eval()(torch.ones(4, 4, dtype=model.weight.dtype))  # the step's gradient is not lost
    engine.step()
    untouched.step()
    for one in (engine, untouched):
        backward(one)
        one.zero_grad()
        backward(one)
        one.step()
        one.close()
    assert all(type(p) is nn.Parameter for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))
    assert clip_grad_norm_(engine.parameters(), 0.1) == 0


def test_clipping_clips_where_gradients_are_shown() -> None:
    engine = after_backward({"zero_optimization": {"stage": 0}}, linear())
    assert clip_grad_norm_(engine.parameters(), 0.125) > 100
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(0.125, rel=1e-4)


# --- weights and moments --------------------------------------------------------------------------------------------


STEPS = 4


@every_pair(ratio=[0.0, 0.4, 1.0], kind=["weights", "exp_avg"], local=[False, True])
def test_a_step_goes_on_from_what_was_set(ratio: float, kind: str, local: bool) -> None:
    engine, other = engine_of("AdamW", ratio, gradient_clipping=0.0), network()
    plain = torch.optim.AdamW(other.parameters(), **KINDS["AdamW"][2])
    parameters = dict(other.named_parameters())
    for step in range(STEPS):
        loss_of(other, step).backward()
        engine.backward(loss_of(engine, step))
        for name in ("0.weight", "2.bias") if step else ():
            before = engine.weights.local(name, kind) if local else engine.weights.whole(name, kind)
            engine.weights.set(name, kind, 3 * before + 0.1, local=local)
            parameter = parameters[name]
            mine = parameter.data if kind == "weights" else plain.state[parameter][kind]
            assert torch.allclose(before.view_as(mine), mine, rtol=0, atol=1e-14)
            mine.mul_(3).add_(0.1)
        engine.step()
        plain.step()
        plain.zero_grad()
    engine.close()
    assert_close(engine.module.parameters(), other.parameters(), atol=1e-13)


@pytest.mark.parametrize(("stage", "ratio"), [(1, 1.0), (2, 0.6), (0, None)])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_change_in_place_outlasts_a_setter_of_another_parameter(stage: int, ratio: float | None, bf16: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    offload = {} if ratio is None else {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage, **offload},
    }
    engine: Any = gptpar.initialize(model=model, config=config)[0]
    with torch.no_grad():
        model[0].weight.fill_(7)
    engine.weights.set("1.weight", "weights", torch.ones(4, 4))
    engine.backward(engine(torch.ones(4, 4, dtype=model[0].weight.dtype)).square().mean())
    engine.step()
    with engine.gathered():
        assert (model[0].weight == 7).all() and (model[1].weight == 1).all()
    engine.close()


def test_a_pass_that_failed_leaves_no_sum_behind() -> None:
    """It was one of a single micro-batch, whose sum is in 16 bits, and was not the last of its layers."""

    class Fails(torch.autograd.Function):
        fails = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if Fails.fails:
                raise ValueError("failed")
            return grad

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor, left_out: int | None = None) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                if number != left_out:
                    x = x + layer(x)
                if number == 1:
                    x = Fails.apply(x)
            return x

    norms = []
    for fails in (False, True):
        model, accumulates = Layers(), 8
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulates,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
        }
        engine: Any = gptpar.initialize(model=model, config=config)[0]
        inputs = torch.randn(accumulates, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        if fails:
            engine.set_gradient_accumulation_steps(1)
            Fails.fails = True
            with pytest.raises(ValueError, match="failed"):
                engine.backward(engine(inputs[0], 3).float().square().mean())
            Fails.fails = False
            engine.set_gradient_accumulation_steps(accumulates)
        for x in inputs:
            engine.backward(engine(x).float().square().mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.close()
    assert norms[0] == norms[1]
