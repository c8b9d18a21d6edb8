"""States that are in host memory between phases of training."""

from pathlib import Path

import pytest
import torch

import gptpar.deepspeed as deepspeed
from gptpar.errors import GptparError
from tests.unit.adapter.beside_torch import assert_close, engine_of, loss_of, train

Kind = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_states_come_back_as_they_were(ratio: float, tmp_path: Path) -> None:
    engine, other = engine_of("AdamW", ratio), engine_of("AdamW", ratio)
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
    assert_close(engine.module.parameters(), other.module.parameters(), atol=0)
    engine.offload_states()
    engine.close()
    other.close()
    assert torch.equal(engine.module[0].weight, other.module[0].weight)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_what_was_refused_while_states_were_away_changed_nothing(ratio: float, tmp_path: Path) -> None:
    """More micro-batches, other frozen parameters, changed weights: in bf16, where sums and masters are apart."""
    bf16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4, "dtype": torch.float32}
    engines = engine, other = [engine_of("AdamW", ratio, **bf16) for _ in range(2)]
    train(engine, 0, 1)
    train(other, 0, 1)
    refusals = [lambda: engine.backward(loss_of(engine, 1)), lambda: engine.set_train_batch_size(8)]
    engine.offload_states()
    engine.module[2].requires_grad_(False)
    for changes in (False, True):
        for one in engines if changes else ():
            with torch.no_grad():
                one.module[0].weight.mul_(2)
        for refused in refusals:
            with pytest.raises(GptparError, match=r"call engine\.reload_states\(\)"):
                refused()
    engine.module[2].requires_grad_(True)
    engine.reload_states()
    engine.save_checkpoint(tmp_path)
    for one in engines:
        one.set_train_batch_size(8)
        train(one, 1, 7)
    assert engine.global_steps == other.global_steps == 4
    assert_close(engine.module.parameters(), other.module.parameters(), atol=0)
    assert_close(*(one.optimizer.fp32_partitioned_groups_flat for one in engines), atol=0)
    engine.close()
    other.close()


def test_where_states_do_not_move() -> None:
    engine = engine_of("AdamW", 0.3)
    with pytest.raises(ValueError, match="'nvme'.: states move to 'cpu' alone"):
        engine.offload_states(device="nvme")
    engine.offload_states(device="none")
    with pytest.raises(ValueError, match=r"include has 'optimizer_states', which is none of optim_states, hp_params"):
        engine.offload_states(include=["optimizer_states", Kind.lp_grads])
    engine.backward(loss_of(engine, 0))
    with pytest.raises(GptparError, match="within a step"):
        engine.offload_states()
    engine.close()
