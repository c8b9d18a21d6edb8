"""What is saved of a module outside of checkpoints: torch.save and safetensors, as large as in plain torch."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine

WIDTH = 64
ZERO: dict[str, Any] = {
    "stage 0": {},
    "CPU optimizer": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.6}},
    "parameters on the CPU": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def build(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)))
    model[1].requires_grad_(False)
    if tied:
        model[3][0].weight = model[0][0].weight
    return model


def initialize(model: nn.Module, zero: str) -> ModuleEngine:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": ZERO[zero]}
    return gptpar.initialize(model=model, config=config)[0]


def saved_bytes(state: Any) -> int:
    with io.BytesIO() as file:
        torch.save(state, file)
        return file.tell()


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(got) == list(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("zero", ZERO)
def test_a_state_is_whole_as_small_as_in_torch_and_stays(zero: str, tied: bool) -> None:
    plain, engine = build(tied).state_dict(), initialize(build(tied), zero)
    state = engine.module_state_dict()
    assert_same(state, plain)
    assert saved_bytes(state) == pytest.approx(saved_bytes(plain), rel=0.01)
    assert saved_bytes(engine.module.state_dict()) == pytest.approx(saved_bytes(plain), rel=0.05)
    for name, value in state.items():
        assert saved_bytes({name: value}) == pytest.approx(saved_bytes({name: plain[name].clone()}), rel=0.02)
    same = [state[f"{block}.0.weight"].data_ptr() for block in (0, 3)]
    assert (same[0] == same[1]) == tied
    left_out = state.keys() - engine.module_state_dict(exclude_frozen_parameters=True).keys()
    assert left_out == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    assert_same(state, plain)  # it stays as it was
    engine.close()


@pytest.mark.parametrize("zero", ZERO)
def test_safetensors(zero: str, tmp_path: Path) -> None:
    plain, engine = build().state_dict(), initialize(build(), zero)
    states = {"module_state_dict": engine.module_state_dict(), "state_dict": engine.module.state_dict()}
    with engine.gathered():
        states["gathered"] = {**engine.module.state_dict(), **dict(engine.module.named_parameters())}
        for name, state in states.items():
            save_file(state, tmp_path / name)
    save_file(plain, tmp_path / "plain")
    for name in states:
        assert_same({key: load_file(tmp_path / name)[key] for key in plain}, plain)
        assert (tmp_path / name).stat().st_size == (tmp_path / "plain").stat().st_size
    engine.close()


@pytest.mark.parametrize("zero", ZERO)
def test_states_and_blocks_inside_gathered(zero: str) -> None:
    """Parameters stay until the outermost block ends, whatever is saved, loaded or changed inside."""
    engine, other = initialize(build(), zero), build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    named, wanted = dict(engine.module.named_parameters()), dict(other.named_parameters())
    with engine.gathered():
        assert_same(named, dict(build().named_parameters()))
        engine.module.load_state_dict(other.state_dict())
        assert_same(named, wanted)
        with engine.gathered(), torch.no_grad():
            named["0.0.weight"].zero_()
        assert not named["0.0.weight"].any() and torch.equal(named["2.0.weight"], wanted["2.0.weight"])
        engine.module.state_dict()
        assert torch.equal(named["2.0.weight"], wanted["2.0.weight"])
    state = engine.module_state_dict()
    assert not state["0.0.weight"].any() and torch.equal(state["2.0.weight"], wanted["2.0.weight"])
    engine.close()
