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


def facts(rank: int) -> list[list[str]]:
    told = []
    for facts in ({"--lr": "1" if rank < 2 else "2", "a": "3"}, {str(k): f"{k} {rank}" for k in range(MAX_LISTED + 2)}):
        with pytest.raises(ConfigError) as error:
            require_same(facts, "mend it.")
        told.append(_told(error))
    with pytest.raises(ConfigError):  # another order is another model
        require_same({"a": "1", "b": "2"} if rank else {"b": "2", "a": "1"}, "")
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    require_same({"--lr": str(rank // 2)}, "", mine)
    require_same({"--lr": "1"}, "")
    return told


def engines(rank: int) -> list[list[str]]:
    told = []
    later = min(rank, 1)
    for stage, lr, width in ((2 * later, 1e-2, 4), (0, 1e-2, 4 + later), (1, 1e-2 / (1 + later), 4)):
        model = torch.nn.Linear(4, width)
        client = torch.optim.AdamW(model.parameters(), lr=lr)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": ADAMW}
        with pytest.raises(GptparError) as error:
            gptpar.initialize(model=model, optimizer=client, config=config)
        told.append(_told(error))
    world.source_hash = lambda: f"source{later}"  # type: ignore[assignment]
    with pytest.raises(ConfigError) as error:
        gptpar.initialize(model=model, config=config)
    return [*told, _told(error)]


def stages(rank: int) -> list[str]:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 5 if rank == 3 else 4)]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "pipeline": {"stages": 2}}
    with pytest.raises(ModelError) as error:
        gptpar.initialize(model=layers, loss_fn=torch.nn.functional.mse_loss, config=config)
    return _told(error)


def all_told(rank: int) -> tuple[list[list[str]], list[str], list[list[str]]]:
    return facts(rank), stages(rank), engines(rank)


def test_each_difference_is_told_by_all_with_machine_and_ranks() -> None:
    """Of flags; of a stage of a pipeline and its replica; of configuration, model, optimizer and code."""
    host = os.uname().nodename
    everyone = spawn(all_told, 4)
    assert all(of_rank[0] == everyone[0][0] for of_rank in everyone)
    of_flags, of_stage, (stage, shape, rate, code) = everyone[1]
    assert of_flags[0] == [f"--lr is 1 on {host} (ranks 0, 1) and 2 on {host} (ranks 2, 3): mend it."]
    assert len(of_flags[1]) == MAX_LISTED + 1 and of_flags[1][-1].startswith("2 further differences")
    assert "([5, 4], float32, trained)" in of_stage[0] and all(of_rank[1] == of_stage for of_rank in everyone)
    assert len(stage) == 1 and stage[0].startswith("zero_stage is 0 on ") and "and 2 on" in stage[0]
    assert "parameter 0 is weight ([4, 4], float32, trained) on" in shape[0] and "weight ([5, 4]" in shape[0]
    assert len(rate) == 1 and rate[0].startswith("lr of parameter group 0 is 0.01 on ") and "0.005 on" in rate[0]
    assert len(code) == 1 and "source0 on" in code[0] and "source1 on" in code[0]
