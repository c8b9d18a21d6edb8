"""The optimizers of ``torch.optim``, from the configuration and from the client, beside torch itself in fp64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.options import read_options
from gptpar.errors import CheckpointError, ConfigError
from tests.unit.adapter.beside_torch import (
    KINDS,
    assert_close,
    engine_of,
    in_plain_torch,
    make_config,
    network,
    train,
)

STEPS = 6


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors have another rate, and no weight decay."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-2, "weight_decay": 0.0},
    ]


def configured(name: str, ratio: float, dtype: torch.dtype = torch.float64) -> Any:
    json_type, kind, params = KINDS[name]
    coupled = {"adam_w_mode": False} if kind is torch.optim.Adam else {}
    config = make_config(ratio, optimizer={"type": json_type, "params": {**params, **coupled}})
    model = network(dtype)
    return gptpar.initialize(model=model, config=config, model_parameters=groups_of(model))[0]


def client(name: str, ratio: float) -> Any:
    return configured(name, ratio) if name == "Lion" else engine_of(name, ratio, groups_of)  # torch has no Lion


@pytest.mark.parametrize("make", [pytest.param(configured, marks=pytest.mark.slow), client])
@pytest.mark.parametrize("name", KINDS)
def test_an_engine_trains_as_torch_does(tmp_path: Path, name: str, make: Callable[[str, float], Any]) -> None:
    """Half of the steps at one ratio, the others by an engine of another, from the first one's checkpoint."""
    first, second = make(name, 0.3 if make is client else 1.0), make(name, 0.0)
    train(first, 0, STEPS // 2)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    train(second, STEPS // 2, STEPS)
    first.close()
    second.close()
    assert_close(second.module.parameters(), in_plain_torch(name, groups_of, STEPS))


FAST = "momentum", "Adam", "RMSprop, all"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in KINDS])
def test_the_ratio_changes_no_bit(name: str) -> None:
    """Ratio 1 is beside torch in the test before."""
    device, both = (configured(name, ratio, torch.float32) for ratio in (0.0, 0.6))
    for engine in (device, both):
        train(engine, 0, STEPS)
        engine.close()
    assert_close(both.module.parameters(), device.module.parameters(), atol=0)


def test_states_take_memory_only_where_they_are_used(tmp_path: Path) -> None:
    states = {name: client(name, 0.0).engine.optimizer.states for name in ("SGD", "momentum", "RMSprop, all")}
    assert (states["SGD"], states["momentum"]) == ((), ("momentum_buffer",))
    assert states["RMSprop, all"] == ("square_avg", "momentum_buffer", "grad_avg")
    options = read_options({"train_batch_size": 1, "optimizer": {"type": "Adagrad"}}, world=1)
    assert options.update.states == ("sum",)
    engine, other = configured("SGD", 0.0), configured("momentum", 0.0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        other.load_checkpoint(tmp_path)


def test_what_torch_refuses_is_told() -> None:
    for kind, params, said in (
        ("SGD", {"betas": [0.9, 0.99]}, r"optimizer.params does not fit torch.optim.SGD: .*'betas'"),
        ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum"),
        ("Adagrad", {"lr": -1}, "Invalid learning rate: -1"),
        ("Lamb", {}, 'optimizer.type is "Lamb"'),
        ("Lion", {"eps": 1e-8}, r"optimizer\.params\.eps"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_options({"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}, world=1)
