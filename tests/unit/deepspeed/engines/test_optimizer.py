"""Whose parameters are trained with which hyperparameters, and the optimizer that is returned."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import gptpar
from gptpar.adapter.options import EngineOptions, read_options
from gptpar.deepspeed.engines.client_optimizer import groups_of
from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.deepspeed.engines.schedulers import scheduler_of
from gptpar.errors import ConfigError, GptparError
from gptpar.offload.twin_flow import TwinFlowAdamW
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.loss_scale import LossScale

ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}}
FROM_FILE = {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "bias_correction": 1.0}


def groups(*args: Any) -> list[dict[str, Any]]:
    return groups_of(*args)[0]


def options(**keys: Any) -> EngineOptions:
    return read_options({"train_batch_size": 1, **keys}, world=1)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))


def problems(optimizer: Any, params: Any, module: nn.Module | None = None, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        groups_of(optimizer, params, module or model(), options(**(keys or {"optimizer": ADAM})))
    return caught.value.problems


def engine_optimizer(groups: list[dict[str, Any]], calls: list[str] | None = None) -> EngineOptimizer:
    """The optimizer of an engine that notes what it is told to do."""
    said = [] if calls is None else calls
    acts = partial(said.append, "update"), partial(said.append, "drop")
    return EngineOptimizer([ADAMW] * len(groups), groups, *acts, LossScale(1.0, False), torch.flatten, bool, int)


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_parameters_may_come_in_any_of_torchs_forms(named: bool) -> None:
    """By default, all trainable ones are a group."""
    module = model()
    for more in ({}, {"lr": 1}):
        form = (module.named_parameters if named else module.parameters)()
        (group,) = groups(None, {"params": form, **more} if more else form, module, options(optimizer=ADAM))
        assert [id(p) for p in group.pop("params")] == [id(p) for p in module.parameters()]
        assert group == FROM_FILE | more
    module[0].weight.requires_grad_(False)
    (group,) = groups(None, None, module, options(optimizer=ADAM))
    assert [id(p) for p in group["params"]] == [id(p) for p in list(module.parameters())[1:]]


def test_groups_numbers_go_before_the_configurations() -> None:
    module = model()
    given = [
        {"params": [module[0].weight, module[2].weight], "weight_decay": 0.5, "name": "matrices"},
        {"params": [module[0].bias, module[2].bias, *module[1].parameters()], "lr": 1e-2},
    ]
    matrices, others = groups(None, given, module, options(optimizer=ADAM))
    assert matrices is given[0] and others is given[1]
    assert len(matrices.pop("params")) == 2 and len(others.pop("params")) == 4
    assert matrices == {**FROM_FILE, "weight_decay": 0.5, "name": "matrices"} and others == {**FROM_FILE, "lr": 1e-2}


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, partial(torch.optim.AdamW, foreach=True), partial(torch.optim.AdamW, capturable=True)]
)
def test_a_clients_optimizer_goes_before_the_configurations(kind: Any) -> None:
    module = model()
    client = kind(module.parameters(), lr=1e-2, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3)
    assert groups(client, None, module, options(optimizer=ADAM))[0] is client.param_groups[0]
    (group,) = groups(kind, [module[0].weight, module[0].bias, *module[1:].parameters()], module, options())
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0.01)
    for more, decay in (({}, 0), ({"weight_decay": 0.1, "decoupled_weight_decay": True}, 0.1)):  # which are AdamW
        client = torch.optim.Adam(module.parameters(), lr=0.5, **more)
        (group,) = groups(client, None, module, options())
        assert (group["lr"], group["weight_decay"]) == (0.5, decay)


def test_a_scheduler_over_another_optimizer_of_the_same_groups_changes_the_engines_rates() -> None:
    """As in Megatron's scripts: the scheduler has torch's optimizer, ``initialize`` gets the groups."""
    module = model()
    given = [{"params": [p for p in module.parameters() if (p.dim() == 1) == bias]} for bias in (False, True)]
    scheduler = LambdaLR(torch.optim.AdamW(given, lr=1.0), lambda step: 1 / (1 + step))
    made = groups(None, given, module, options(optimizer=ADAM))
    optimizer = engine_optimizer(made)
    assert scheduler_of(scheduler, optimizer, None) is scheduler
    scheduler.step()
    assert [how.lr for how in optimizer.hyperparameters()] == [0.5, 0.5]


def test_trainable_parameters_in_no_group_are_told() -> None:
    module = model()
    expected = "5 trainable parameters are in no group and will not be trained: 0.weight, 0.bias, 1.weight, 1.bias and "
    with pytest.warns(UserWarning, match=re.escape(expected + "1 more. Add a group, or set requires_grad to False.")):
        groups_of(None, [module[2].bias], module, options(optimizer=ADAM))


def test_an_optimizer_without_an_update_of_the_engine_is_refused() -> None:
    module = model()
    for other in (torch.optim.Rprop(module.parameters()), TwinFlowAdamW(module.parameters(), offload_ratio=0.0)):
        (problem,) = problems(other, None, module)
        assert problem.startswith(f"optimizer is of type {type(other).__name__}: the engine has the updates of torch's")
    use = "pass an optimizer of torch (AdamW, Adam, SGD, Adagrad, RMSprop or Muon), or none and the configuration's opt"
    for wrong, what in ((3, "optimizer is"), (lambda params: len(params), "the function optimizer returns what is")):
        assert problems(wrong, None)[0].startswith(f"{what} of type int: {use}")
    (problem,) = problems(None, None, zero_optimization={"stage": 2})
    assert problem.startswith('there is no optimizer: add {"optimizer": {"type": "AdamW"}} to the configuration')
    assert problem.endswith("needs none at ZeRO stage 0 or 3, and this is stage 2.")


def test_everything_wrong_with_an_optimizer_is_told_at_once() -> None:
    module = model()
    client = torch.optim.Adam(
        [
            {"params": [module[0].weight], "weight_decay": 0.1, "amsgrad": True},
            {"params": [module[0].bias, nn.Parameter(torch.zeros(4, 5))], "maximize": True},
        ]
    )
    module[0].bias.grad = torch.ones(3)
    client.step()
    client.param_groups[0]["lr"] = -1
    client.param_groups[1]["params"].append(module[0].weight)
    expected = [
        "optimizer has amsgrad True, False in its groups, which share one update: make it the same in all.",
        "optimizer has maximize=True in group 1, which gptpar's updates do not have: leave it out.",
        "optimizer has taken steps: it has states of 1 parameters, which the engine would not take over; pass it",
        "0.weight is in the groups 0 and 1: name each parameter once.",
        "not among the model's parameters: a tensor of shape (4, 5) (group 1, place 1): pass those of the model that ",
        "lr is -1, not at least 0",
    ]
    for problem, start in zip(problems(client, None, module), expected, strict=True):
        assert problem.startswith(start)


def test_parameters_that_cannot_be() -> None:
    module = model()
    twice = [*module.parameters(), module[1].bias]
    assert problems(None, twice, module) == ["1.bias is in group 0 twice: name each parameter once."]
    assert problems(None, [{"params": [module[0].weight]}, module[0].bias], module) == [
        "model_parameters has groups and parameters side by side: make it one or the other."
    ]
    foreign, betas = problems(None, [{"params": ["0.weight"], "betas": (1.5, 0.9)}], module)
    assert foreign.startswith("not among the model's parameters: an entry of type str (group 0, place 0): pass")
    assert betas == "beta 1.5 is not in [0, 1)"
    lacking = [{"lr": 1e-3}, {"params": [module[0].weight]}, {"params": 5}]
    assert problems(None, lacking, module) == [
        f'model_parameters: group {place} has no list "params": add one.' for place in (0, 2)
    ]
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    told = "there is no trainable parameter in the groups: set requires_grad before gptpar.initialize."
    assert problems(None, None, module) == problems(None, module.parameters(), module) == [told]


# --- the returned optimizer -----------------------------------------------------------------------------------------


def returned(*rates: float, calls: list[str] | None = None) -> EngineOptimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], **FROM_FILE, "lr": lr} for lr in rates]
    return engine_optimizer(groups, calls)


def test_the_groups_are_live_and_the_engine_acts() -> None:
    calls: list[str] = []
    optimizer = returned(0.1, 0.2, calls=calls)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[1] |= {"lr": torch.tensor(0.5), "weight_decay": 0}
    assert optimizer.hyperparameters() == (
        AdamHyperparameters(0.1, 0.8, 0.9, 1e-6, 0.2),
        AdamHyperparameters(0.5, 0.8, 0.9, 1e-6, 0.0),
    )
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert calls == ["update", "drop", "drop"] and not optimizer.state
    assert "weight_decay: 0.2" in repr(optimizer)


def test_a_state_dict_is_the_groups_numbers() -> None:
    first, second = returned(0.1, 0.2), returned(1.0, 1.0)
    first.param_groups[1]["initial_lr"] = 0.7
    held = second.param_groups[1]
    second.load_state_dict(first.state_dict())
    assert second.hyperparameters() == first.hyperparameters()
    assert held is second.param_groups[1] and held["initial_lr"] == 0.7 and len(held["params"][0]) == 2
    assert first.state_dict()["state"] == {}


def test_what_the_returned_optimizer_cannot_do() -> None:
    optimizer = returned(0.1)
    with pytest.raises(GptparError, match=r"^optimizer.step\(closure\) differentiates a loss itself"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(GptparError, match="^a parameter group was added after gptpar.initialize"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    state = {"state": {0: {"step": 1}}, "param_groups": []}
    with pytest.raises(GptparError, match="has moments of 1 parameters, and the engine keeps its own"):
        optimizer.load_state_dict(state)
    with pytest.raises(GptparError, match=r"groups of \[1, 1\] parameters, and the optimizer has groups of \[1\]"):
        optimizer.load_state_dict(returned(0.1, 0.2).state_dict())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (torch.optim.SGD, "momentum", 0.9),
        (torch.optim.RMSprop, "momentum", 0.5),
        (torch.optim.Adam, "weight_decay", 0.1),
        (torch.optim.AdamW, "maximize", True),
    ],
)
def test_what_an_update_cannot_become_is_told(kind: Any, name: str, value: Any) -> None:
    """It follows from the groups' first values; torch would take the new ones."""
    module = model()
    config = {"train_batch_size": 2, "gradient_clipping": 0.0}
    optimizer = kind(module.parameters(), lr=0.1)
    engine: Any = gptpar.initialize(model=module, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.optimizer.param_groups[0][name] = value
    with pytest.raises(GptparError, match=f"parameter group 0 has .*{name}"):
        engine.step()
    engine.close()
