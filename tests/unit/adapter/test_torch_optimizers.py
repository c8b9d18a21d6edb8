"""The optimizers of ``torch.optim``, from the configuration and from the client, beside torch itself in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.options import read_options
from gptpar.errors import CheckpointError, ConfigError
from tests.unit.adapter.beside_torch import KINDS, in_plain_torch, loss_of, make_config, network

STEPS = 6


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors have another rate, and no weight decay."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-2, "weight_decay": 0.0},
    ]


def make(name: str, ratio: float, *, client: bool, dtype: torch.dtype = torch.float64) -> Any:
    (json_type, kind, params), model = KINDS[name], network(dtype)
    if kind is torch.optim.Adam:
        section: dict[str, Any] = {"type": json_type, "params": {**params, "adam_w_mode": False}}
    else:
        section = {"type": json_type, "params": params}
    config = make_config(ratio)
    if client:
        return gptpar.initialize(model=model, config=config, optimizer=kind(groups_of(model), **params))[0]
    return gptpar.initialize(model=model, config={**config, "optimizer": section}, model_parameters=groups_of(model))[0]


def train(engine: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        engine.backward(loss_of(engine, step))
        engine.step()


@pytest.mark.parametrize(
    "client", [pytest.param(False, id="configured", marks=pytest.mark.slow), pytest.param(True, id="client")]
)
@pytest.mark.parametrize("name", KINDS)
def test_an_engine_trains_as_torch_does(tmp_path: Path, name: str, client: bool) -> None:
    """Half of the steps at one ratio, the others by an engine of another, from the first one's checkpoint."""
    client = client and name != "Lion"  # which torch lacks
    first, second = make(name, 0.3 if client else 1.0, client=client), make(name, 0.0, client=client)
    train(first, 0, STEPS // 2)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    train(second, STEPS // 2, STEPS)
    first.close()
    second.close()
    for got, want in zip(second.module.parameters(), in_plain_torch(name, groups_of, STEPS), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("momentum", "Adam", "RMSprop, all") else pytest.param(name, marks=pytest.mark.slow)
        for name in KINDS
    ],
)
def test_the_ratio_changes_no_bit(name: str) -> None:
    ends = []
    for ratio in (0.0, 0.6, 1.0):
        engine = make(name, ratio, client=False, dtype=torch.float32)
        train(engine, 0, STEPS)
        engine.close()
        ends.append([p.detach() for p in engine.module.parameters()])
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))


def test_states_take_memory_only_where_they_are_used(tmp_path: Path) -> None:
    states = {name: make(name, 0.0, client=name != "Lion").engine.optimizer.states for name in KINDS}
    assert (states["SGD"], states["momentum"]) == ((), ("momentum_buffer",))
    assert states["RMSprop, all"] == ("square_avg", "momentum_buffer", "grad_avg")
    options = read_options({"train_batch_size": 1, "optimizer": {"type": "Adagrad"}}, world=1)
    assert options.update.states == ("sum",)
    engine, other = make("SGD", 0.0, client=False), make("momentum", 0.0, client=False)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        other.load_checkpoint(tmp_path)


def test_what_torch_refuses_is_told() -> None:
    def config(kind: str, **params: Any) -> dict[str, Any]:
        return {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}

    for wrong, said in (
        (config("SGD", betas=[0.9, 0.99]), r"optimizer.params does not fit torch.optim.SGD: .*'betas'"),
        (config("SGD", nesterov=True), "Nesterov momentum requires a momentum"),
        (config("Adagrad", lr=-1), "Invalid learning rate: -1"),
        (config("Lamb"), 'optimizer.type is "Lamb"'),
        (config("Lion", eps=1e-8), r"optimizer\.params\.eps"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_options(wrong, world=1)
