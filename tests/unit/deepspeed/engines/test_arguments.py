"""Arguments of ``gptpar.initialize`` that are DeepSpeed's: command line, configuration, processes."""

import argparse
import inspect
import json
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import gptpar
from gptpar.deepspeed.engines.arguments import before_meeting, chosen_config, take_arguments
from gptpar.errors import ConfigError


def config(micro: int = 2) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": micro, "optimizer": {"type": "AdamW"}}


def micro_batch_of(**given: Any) -> int:
    engine = gptpar.initialize(model=nn.Linear(2, 1), **given)[0]
    engine.close()
    return engine.train_micro_batch_size_per_gpu()


def unit(data: int = 1, **sizes: int) -> SimpleNamespace:
    sizes = {"data_parallel": data, **sizes}
    return SimpleNamespace(**{f"get_{name}_world_size": lambda size=size: size for name, size in sizes.items()})


def test_places_are_deepspeeds() -> None:
    wanted = "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
    wanted += "collate_fn config mesh_param config_params"
    assert list(inspect.signature(gptpar.initialize).parameters)[:13] == wanted.split()


# The configuration.


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(3)))
    parser = argparse.ArgumentParser()
    assert gptpar.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed is True and micro_batch_of(args=args) == 3
    nothing = parser.parse_args([])
    assert (nothing.deepspeed, nothing.deepspeed_config) == (False, None)
    assert micro_batch_of(args=nothing, config=config()) == 2


def test_which_of_several_configurations_counts() -> None:
    """``config``, then its former name, then what ``args.deepspeed`` is if it is no flag, then its oldest name."""
    named = Namespace(deepspeed="ds.json", deepscale_config="old.json")
    assert micro_batch_of(config_params=config(4)) == micro_batch_of(args=Namespace(deepspeed=config(4))) == 4
    assert chosen_config(config(3), config(4), named) == config(3)
    assert chosen_config(None, config(4), named) == config(4)
    assert chosen_config(None, None, named) == "ds.json"
    assert chosen_config(None, None, Namespace(deepscale_config="old.json")) == "old.json"
    assert chosen_config(None, None, Namespace(deepspeed=config(7), deepspeed_config="ds.json")) is None
    for flag in (True, False, None, ""):
        assert chosen_config(None, None, Namespace(deepspeed=flag)) is None


# The processes.


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**given: Any) -> Namespace:
        take_arguments(args := Namespace(**given), None, None, world=4, is_pipeline=False)
        return args

    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [taken(local_rank=given).local_rank for given in (-1, 0, None, 2)] == [2] * 4
    assert not hasattr(taken(), "local_rank")
    for given, said in ((1, "args.local_rank is 1, .* number 2 of its machine"), ("2", "of type str")):
        with pytest.raises(ConfigError, match=said):
            taken(local_rank=given)
    monkeypatch.delenv("LOCAL_RANK")
    assert taken(local_rank=3).local_rank == 3  # nobody else says where this process is


def test_a_unit_of_data_parallelism_alone() -> None:
    mpu = unit(1, model_parallel=1, tensor_model_parallel=1, pipeline_model_parallel=1)
    assert micro_batch_of(mpu=mpu, mesh_param=(1, 1), config=config()) == 2
    with pytest.raises(ConfigError, match="beside a pipeline"):
        gptpar.initialize(model=[nn.Linear(2, 1)], mpu=mpu, config=config())


@pytest.mark.parametrize(
    ("mpu", "said"),
    [
        (unit(2, model_parallel=2), ["data_parallel_world_size.. is 2 of 4", "get_model_parallel_world_size.. is 2"]),
        (unit(4, pipe_parallel=2), ["get_pipe_parallel_world_size.. is 2: .* leave mpu out"]),
        (unit(4, sequence_parallel=4), ["sequence_parallel_world_size.. is 4"]),
        (SimpleNamespace(), ["SimpleNamespace, has no get_data_parallel_world_size"]),
    ],
)
def test_other_units(mpu: Any, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        take_arguments(None, mpu, (2, 2), world=4, is_pipeline=False)
    for sentence in [*said, r"mesh_param is \(2, 2\), .* \(4, 1\)"]:
        caught.match(sentence)


def test_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # so that it is as before at the end
    monkeypatch.delenv("MASTER_PORT")
    before_meeting(None, None)
    assert "MASTER_PORT" not in os.environ
    before_meeting(1234, None)
    before_meeting(5678, None)
    assert os.environ["MASTER_PORT"] == "1234"
    before_meeting(None, False)  # one process needs no group
    monkeypatch.setenv("WORLD_SIZE", "2")
    before_meeting(None, True)
    with pytest.raises(ConfigError, match="dist_init_required is False, .* 2 processes: call"):
        before_meeting(None, False)
