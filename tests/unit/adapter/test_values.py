"""While a module is taken over, none of its parameters is in memory twice for longer than its copy takes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gptpar
from gptpar.adapter import build, values

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))


def storages_of(model: nn.Module) -> dict[str, StorageWeakRef]:
    return {name: StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters()}


def test_each_old_storage_is_freed_before_the_next_parameter_leaves_its_own() -> None:
    model = make_model()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    old = storages_of(model)

    def watched() -> Iterator[nn.Parameter]:
        for number, parameter in enumerate(model.parameters()):
            assert [one.expired() for one in old.values()] == [place < number for place in range(len(old))]
            yield parameter

    values.wait_on_host(watched())
    assert all(one.expired() for one in old.values())
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


def test_other_strides_stay() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    values.wait_on_host([parameter])
    assert parameter.stride() == (1, 3)
    assert torch.equal(parameter, torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_each_old_storage_is_freed_before_the_next_unit_is_filled(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    if frozen:
        for block in model[:2]:
            block.requires_grad_(False)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    old, taken = storages_of(model), []
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


class OnGpu:
    """Stands for a parameter that is on a GPU."""

    device, nbytes = torch.device("cuda", 0), 1 << 30


@pytest.mark.parametrize(
    ("free", "processes", "moves"), [(4, 2, True), (4, 1, True), (3, 2, False), (2, 1, True), (0, 1, False)]
)
def test_parameters_move_where_half_of_the_free_host_memory_holds_those_of_all_processes(
    free: int, processes: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(values, "available_memory", lambda: free << 30)
    monkeypatch.setattr(values, "place_on_machine", lambda: (0, processes))
    monkeypatch.setattr(values, "wait_on_host", moved.extend)
    parameter: Any = OnGpu()
    values.move_aside([parameter], torch.device("cuda", 0))
    assert moved == [parameter] * moves


@pytest.mark.parametrize("config", [{"ratio": 0.5}, {}], ids=["offload", "without"])
def test_host_memory_that_the_engine_needs_is_left_to_it(
    config: Mapping[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(build, "move_aside", lambda parameters, device: asked.append(len(list(parameters))))
    zero = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", **config}}} if config else {}
    engine, *_ = gptpar.initialize(model=make_model(), config=CONFIG | zero)
    engine.close()
    assert asked == ([] if config else [12])
