"""States that are in host memory between phases of training."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gptpar
import gptpar.deepspeed as deepspeed
from gptpar.errors import GptparError
from tests.unit.adapter.beside_torch import KINDS, loss_of, make_config, network

Kind = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum


def make(ratio: float) -> Any:
    _, kind, params = KINDS["AdamW"]
    model = network()
    return gptpar.initialize(model=model, config=make_config(ratio), optimizer=kind(model.parameters(), **params))[0]


def train(engine: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        engine.backward(loss_of(engine, step))
        engine.step()


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_states_come_back_as_they_were(ratio: float, tmp_path: Path) -> None:
    engine, other = make(ratio), make(ratio)
    train(other, 0, 4)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    vectors, gradients = engine.engine.optimizer.vectors, engine.engine.gradients.memory.shard
    with torch.no_grad():
        before = loss_of(engine, 7)
    engine.optimizer.offload_states(include={Kind.optim_states, Kind.lp_grads}, non_blocking=True)
    assert vectors["exp_avg"].untyped_storage().nbytes() == gradients.untyped_storage().nbytes() == 0
    assert vectors["weights"].untyped_storage().nbytes() > 0
    engine.reload_states()
    engine.offload_states()
    away = 0 if ratio else engine.engine.parameters.everything.nbytes
    assert vectors["weights"].untyped_storage().nbytes() == away
    with torch.no_grad():
        assert torch.equal(loss_of(engine, 7), before)
    for refused in (
        lambda: engine.backward(loss_of(engine, 2)),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.weights.whole_here("0.weight", "exp_avg"),
        engine.offload_states,
    ):
        with pytest.raises(GptparError, match=r"call engine\.reload_states\(\)"):
            refused()
    engine.reload_states(non_blocking=True)
    train(engine, 2, 4)
    for got, want in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(got, want)
    engine.offload_states()
    engine.close()
    other.close()
    assert torch.equal(engine.module[0].weight, other.module[0].weight)


def test_where_states_do_not_move() -> None:
    engine = make(0.3)
    with pytest.raises(ValueError, match="'nvme'.: states move to 'cpu' alone"):
        engine.offload_states(device="nvme")
    engine.offload_states(device="none")
    engine.backward(loss_of(engine, 0))
    with pytest.raises(GptparError, match="within a step"):
        engine.offload_states()
    engine.close()
