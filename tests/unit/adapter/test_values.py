"""While a module is taken over, none of its parameters is in memory twice for longer than its copy takes."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gptpar
from gptpar.adapter import build, values

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))


def storages_of(model: nn.Module) -> dict[str, StorageWeakRef]:
    return {name: StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters()}


def test_each_old_storage_is_freed_before_the_next_parameter_leaves_its_own() -> None:
    model = make_model()
    model[1][0].weight = nn.Parameter(torch.arange(16.0).view(4, 4).t())
    wanted, old = copy.deepcopy(model.state_dict()), storages_of(model)

    def watched() -> Iterator[nn.Parameter]:
        for number, parameter in enumerate(model.parameters()):
            assert [one.expired() for one in old.values()] == [place < number for place in range(len(old))]
            yield parameter

    values.wait_on_host(watched())
    assert all(one.expired() for one in old.values()) and model[1][0].weight.stride() == (1, 4)
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_each_unit_frees_its_old_storages_when_it_is_filled(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    if frozen:
        for block in model[:2]:
            block.requires_grad_(False)
    wanted, old, taken = copy.deepcopy(model.state_dict()), storages_of(model), []
    take_values = build.take_values

    def checked(name: str, value: values.Value) -> Callable[[], torch.Tensor]:
        def take() -> torch.Tensor:
            unit = name.split(".")[0]
            alive = [one for one in taken if not old[one].expired() and one.split(".")[0] != unit]
            assert not alive, (name, alive)
            taken.append(name)
            return value()

        return take

    def watched(engine: Any, units: Any, given: dict[str, values.Value], topology: Any) -> None:
        for name in list(given):
            given[name] = checked(name, given.pop(name))
        take_values(engine, units, given, topology)

    monkeypatch.setattr(build, "take_values", watched)
    engine, *_ = gptpar.initialize(model=model, config=CONFIG)
    assert sorted(taken) == sorted(wanted)
    assert all(one.expired() for one in old.values())
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    engine.close()


@pytest.mark.parametrize(
    ("free", "processes", "moves"), [(4, 2, True), (4, 1, True), (3, 2, False), (2, 1, True), (0, 1, False)]
)
def test_where_parameters_move(free: int, processes: int, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where half of the free host memory holds those of all processes."""
    moved: list[Any] = []
    monkeypatch.setattr(values, "available_memory", lambda: free << 30)
    monkeypatch.setattr(values, "place_on_machine", lambda: (0, processes))
    monkeypatch.setattr(values, "wait_on_host", moved.extend)
    parameter: Any = SimpleNamespace(device=torch.device("cuda", 0), nbytes=1 << 30)
    values.move_aside([parameter], torch.device("cuda", 0))
    assert moved == [parameter] * moves


def test_host_memory_that_the_engine_needs_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(build, "move_aside", lambda parameters, device: asked.append(len(list(parameters))))
    offload = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    for more, wanted in ((offload, []), ({}, [12])):
        engine, *_ = gptpar.initialize(model=make_model(), config=CONFIG | more)
        engine.close()
        assert asked == wanted
