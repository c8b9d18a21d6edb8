"""Processes that were started differently (other flags, another version, another model) refuse to train together."""

import os

import pytest
import torch
import torch.distributed as dist

import gptpar
from gptpar.errors import ConfigError, GptparError, ModelError
from gptpar.topology import world
from gptpar.topology.agreement import MAX_LISTED, require_same
from tests.spawn import spawn

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def _told(error: pytest.ExceptionInfo[GptparError]) -> list[str]:
    assert isinstance(error.value, ConfigError | ModelError)
    return error.value.problems


def _facts(rank: int) -> list[list[str]]:
    told = []
    for facts in ({"--lr": "1" if rank < 2 else "2", "a": "3"}, {str(k): f"{k} {rank}" for k in range(MAX_LISTED + 2)}):
        with pytest.raises(ConfigError) as error:
            require_same(facts, "mend it.")
        told.append(_told(error))
    with pytest.raises(ConfigError):  # another order is another model
        require_same({"a": "1", "b": "2"} if rank else {"b": "2", "a": "1"}, "")
    mine = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    require_same({"--lr": str(rank // 2)}, "", mine)
    require_same({"--lr": "1"}, "")
    return told


def test_each_difference_is_told_by_all_with_machine_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    host = os.uname().nodename
    everyone = spawn(_facts, 3)
    assert everyone[0] == everyone[1] == everyone[2]
    assert everyone[0][0] == [f"--lr is 1 on {host} (ranks 0, 1) and 2 on {host} (rank 2): mend it."]
    assert len(everyone[0][1]) == MAX_LISTED + 1 and everyone[0][1][-1].startswith("2 further differences")


def _engines(rank: int) -> list[list[str]]:
    told = []
    for stage, lr, width in ((2 * rank, 1e-2, 4), (0, 1e-2, 4 + rank), (1, 1e-2 / (1 + rank), 4)):
        model = torch.nn.Linear(4, width)
        client = torch.optim.AdamW(model.parameters(), lr=lr)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": ADAMW}
        with pytest.raises(GptparError) as error:
            gptpar.initialize(model=model, optimizer=client, config=config)
        told.append(_told(error))
    world.source_hash = lambda: f"source{rank}"  # type: ignore[assignment]
    with pytest.raises(ConfigError) as error:
        gptpar.initialize(model=model, config=config)
    return [*told, _told(error)]


def test_initialize_compares_configuration_model_optimizer_and_code() -> None:
    stage, shape, rate, code = spawn(_engines, 2)[1]
    assert len(stage) == 1 and stage[0].startswith("zero_stage is 0 on ") and "and 2 on" in stage[0]
    assert "parameter 0 is weight ([4, 4], float32, trained) on" in shape[0] and "weight ([5, 4]" in shape[0]
    assert len(rate) == 1 and rate[0].startswith("lr of parameter group 0 is 0.01 on ") and "0.005 on" in rate[0]
    assert len(code) == 1 and "source0 on" in code[0] and "source1 on" in code[0]


def _stages(rank: int) -> list[str]:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 5 if rank == 3 else 4)]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "pipeline": {"stages": 2}}
    with pytest.raises(ModelError) as error:
        gptpar.initialize(model=layers, loss_fn=torch.nn.functional.mse_loss, config=config)
    return _told(error)


def test_a_stage_that_differs_from_its_replicas_is_refused_by_all() -> None:
    everyone = spawn(_stages, 4)
    assert all("([5, 4], float32, trained)" in told[0] for told in everyone), everyone
