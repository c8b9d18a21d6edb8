"""``deepspeed.runtime.zero.config``: sections as objects."""

import pytest
from gptpar.deepspeed.runtime.zero import leaf_module_config
from gptpar.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum, get_zero_config
from torch import nn

import gptpar
from gptpar.errors import ConfigError


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
