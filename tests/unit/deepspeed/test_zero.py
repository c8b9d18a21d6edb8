"""``deepspeed.zero``: its configuration as objects, models that are built within ``Init``, and leaf modules."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gptpar.deepspeed.runtime.zero import leaf_module_config
from gptpar.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum, get_zero_config
from gptpar.deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from torch import nn

import gptpar
import gptpar.deepspeed as deepspeed
from gptpar.deepspeed.leaf_modules import mark_configured
from gptpar.errors import ConfigError, GptparError

ZERO_3 = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}


def test_defaults_aliases_and_former_keys() -> None:
    assert (DeepSpeedZeroConfig().stage, DeepSpeedZeroConfig().overlap_comm) == (0, False)
    found = DeepSpeedZeroConfig(
        stage=3, stage3_max_live_parameters=7, cpu_offload=True, offload_param={"device": "cpu"}
    )
    assert found.stage is ZeroStageEnum.weights and found.overlap_comm and found.max_live_parameters == 7
    assert found.offload_optimizer.device == "cpu" and found.offload_optimizer.ratio == 1.0
    assert (found.offload_param.device, found.offload_param.buffer_count) == ("cpu", 5)
    assert get_zero_config({"zero_optimization": True}).stage == 1
    assert DeepSpeedZeroConfig(leaf_module={"names": "a"}).leaf_module.names == ["a"]
    leaves = DeepSpeedZeroConfig().leaf_module
    assert len(leaves.classes) == 3 and leaves.classes == leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES
    assert leaves.names == leaves.name_suffixes == leaf_module_config.DEFAULT_LEAF_MODULE_NAME_SUFFIXES == []
    with pytest.raises(ConfigError, match="zero_optimization has no key stages; it has stage, contiguous"):
        DeepSpeedZeroConfig(stages=3)


def test_a_configuration_may_have_its_values() -> None:
    zero = {"stage": ZeroStageEnum.gradients, "offload_optimizer": {"device": OffloadDeviceEnum.cpu, "ratio": 0.5}}
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine = gptpar.initialize(model=nn.Linear(4, 4), config=config)[0]
    assert engine.zero_optimization_stage() == 2 and engine.engine.table.ratio == 0.5
    engine.close()


# --- Init -----------------------------------------------------------------------------------------------------------


def test_processes_meet_where_a_model_is_built() -> None:
    """As transformers' from_pretrained needs it, which asks for this process's rank inside of ``zero.Init``."""
    with deepspeed.zero.Init(enabled=False):
        assert not dist.is_initialized()
    with deepspeed.zero.Init():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with torch.device("cpu"), pytest.raises(GptparError, match="initialize where no tensor has memory"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    value = torch.ones(2)
    deepspeed.comm.inference_all_reduce(value)
    assert value.tolist() == [1.0, 1.0]


TWO_PROCESSES = SimpleNamespace(get_data_parallel_world_size=lambda: 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_quantized_weights": True}, "quantized weights would change the numbers: leave them out"),
        ({"zero_quantized_nontrainable_weights": True}, "quantized weights would change the numbers"),
        ({"remote_device": "nvme"}, "parameters are on the GPU or in host memory: give remote_device='cpu'"),
        ({"data_parallel_group": 1}, "a data-parallel group has 1 of 4 processes: .* so leave it out"),
        ({"sequence_data_parallel_group": 2}, "a data-parallel group has 2 of 4 processes"),
        ({"mpu": TWO_PROCESSES}, r"mpu.get_data_parallel_world_size\(\) is 2 of 4"),
    ],
)
def test_what_zero_init_cannot_do_is_refused(arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: group or 4)
    with pytest.raises(GptparError, match=message), deepspeed.zero.Init(**arguments):
        raise AssertionError("the context was entered")
    with deepspeed.zero.Init(enabled=False, **arguments):
        model = nn.Linear(2, 2)
    assert not model.weight.is_meta


def test_arguments_of_zero_init_are_deepspeeds_and_its_number_format_is_that_of_parameters() -> None:
    """Parameters are rounded to it and buffers keep theirs; an engine trains what it was given."""
    made = []
    for context in (contextlib.nullcontext(), deepspeed.zero.Init(dtype=torch.bfloat16)):
        torch.manual_seed(3)
        with context:
            made.append(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    kept = deepspeed.initialize(model=made[1], config=ZERO_3)[0].module_state_dict()
    assert kept["0.weight"].dtype == torch.bfloat16 and kept["1.running_mean"].dtype == torch.float32
    for name, value in made[0].state_dict().items():
        assert torch.equal(kept[name], value.to(kept[name].dtype)), name
    with deepspeed.zero.Init(dtype=torch.bfloat16), pytest.raises(GptparError, match="float16, and torch.bfloat16 aro"):
        deepspeed.zero.Init(dtype=torch.float16).__enter__()
    others = {"mem_efficient_linear": False, "remote_device": "cpu", "pin_memory": True, "config_dict_or_path": {}}
    with deepspeed.zero.Init(None, None, **others, config=None, dtype=torch.bfloat16, tensor_overrides=None):
        model = nn.Linear(2, 2)
    assert model.weight.is_meta and model.weight.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="unexpected keyword argument 'remote_devise'"):
        deepspeed.zero.Init(remote_devise="cpu")


def test_initialize_ends_the_zero_init_around_it() -> None:
    with deepspeed.zero.Init(config_dict_or_path=ZERO_3):
        with deepspeed.zero.Init(config_dict_or_path=ZERO_3):
            first = nn.Linear(4, 4)
        assert hasattr(first.weight, "ds_id")
        engine = deepspeed.initialize(model=first, config=ZERO_3)[0]
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        with deepspeed.zero.Init(config_dict_or_path=ZERO_3):
            second = nn.Linear(4, 4)
        third = nn.Linear(4, 4)
    assert second.weight.is_meta and hasattr(second.weight, "ds_id") and not third.weight.is_meta
    deepspeed.initialize(model=second, config=ZERO_3)


# --- leaf modules ---------------------------------------------------------------------------------------------------


class Experts(nn.ModuleList):
    """A class derived from another."""


def _model() -> nn.ModuleDict:
    return nn.ModuleDict({"experts": Experts([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize("wanted", [Experts, nn.ModuleList, "Experts", f"{__name__}.Experts"])
def test_a_class_its_base_and_their_names_mark_a_module_until_it_is_taken_away(wanted: type | str) -> None:
    model = _model()
    assert set_z3_leaf_modules(model, [wanted]) == [model["experts"]] == get_z3_leaf_modules(model)
    assert z3_leaf_module(model["experts"]) and not z3_leaf_module(model["head"])
    assert unset_z3_leaf_modules(model, [wanted]) == [model["experts"]]
    assert get_z3_leaf_modules(model) == []


def test_names_and_ends_of_names_mark_modules_and_those_of_none_are_returned_or_an_error() -> None:
    model = _model()
    assert set_z3_leaf_modules_by_name(model, ["head", "tail"], False) == ([model["head"]], ["tail"])
    first, second = model["experts"]
    assert set_z3_leaf_modules_by_suffix(model, [".1", ".0"]) == ([second, first], [])
    assert get_z3_leaf_modules(model) == [first, second, model["head"]]
    with pytest.raises(ValueError, match="no modules of the names"):
        set_z3_leaf_modules_by_name(model, ["tail"])
    with pytest.raises(ValueError, match="no module of the classes"):
        set_z3_leaf_modules(model, [nn.Conv2d])
    assert set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []


def test_a_configuration_marks_what_the_model_has_of_it() -> None:
    model = _model()
    mark_configured(model, {})
    assert get_z3_leaf_modules(model) == []
    mark_configured(model, {"classes": ["Experts", "Other"], "names": "head", "name_suffixes": ["s.1", "tail"]})
    assert get_z3_leaf_modules(model) == [model["experts"], model["experts"][1], model["head"]]
