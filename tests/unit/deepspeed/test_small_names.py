"""Tests of DeepSpeed's small names: operators that are here, constants, versions."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gptpar.deepspeed.ops.op_builder import CPUAdamBuilder, FusedLambBuilder
from gptpar.deepspeed.runtime import lr_schedules, precision_config
from gptpar.deepspeed.utils.torch import required_torch_version

import gptpar.deepspeed as deepspeed
from gptpar.errors import GptparError
from gptpar.topology import world

ZERO_3 = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}


def test_programs_ask_which_operators_are_here() -> None:
    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME] and CPUAdamBuilder().is_compatible()
    assert not deepspeed.ops.__compatible_ops__[FusedLambBuilder.NAME] and not FusedLambBuilder().is_compatible()
    with pytest.raises(GptparError, match="operator cpu_adam is not built by gptpar: use deepspeed.ops.adam"):
        CPUAdamBuilder().load()
    assert not hasattr(deepspeed.ops.op_builder, "NoBuilder")


def test_constants_and_versions() -> None:
    assert (lr_schedules.WARMUP_LR, lr_schedules.WARMUP_NUM_STEPS) == ("WarmupLR", "warmup_num_steps")
    assert lr_schedules.CYCLE_MIN_MOM == "cycle_min_mom" and lr_schedules.LR_RANGE_TEST == "LRRangeTest"
    assert deepspeed.runtime.config.ADAM_OPTIMIZER == "adam"
    assert not hasattr(lr_schedules, "WARMDOWN")
    numbers = deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__
    assert ".".join(map(str, numbers)) == deepspeed.__version__
    assert required_torch_version(min_version=2.1) and not required_torch_version(min_version=99.0)
    assert not required_torch_version(max_version=1.13) and required_torch_version(min_version=1.8, max_version=99.0)


def test_sections_and_values_of_configurations() -> None:
    fp16 = precision_config.get_float16_config({"fp16": {"enabled": True, "loss_scale": 128.0}})
    assert (fp16.enabled, fp16.loss_scale, fp16.hysteresis, fp16.initial_dynamic_scale()) == (True, 128.0, 2, 65536)
    assert precision_config.get_bfloat16_config({"bfloat16": {"enabled": True}}).check_grad_overflow
    assert deepspeed.runtime.config.get_gradient_clipping({}) == deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT
    found = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "data_types": {"param_dtype": "fp32"}})
    assert (found.param_dtype, found.buffer_dtype, found.gradient_allreduce_op) == ("fp32", None, "mean")
    assert deepspeed.runtime.zero.partition_parameters.partitioned_param_data_shape == [0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes .* each would train by itself: export RANK="),
        ({"RANK": "0"}, "of RANK and WORLD_SIZE only one is set. Start the processes with torchrun"),
        ({"WORLD_SIZE": "2"}, "of RANK and WORLD_SIZE only one is set. Start the processes with torchrun"),
    ],
)
def test_half_of_a_launch_is_refused(given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes would each train by themselves."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GptparError, match=told):
        deepspeed.init_distributed()
    assert ("RANK" in os.environ) == ("RANK" in given) and not dist.is_initialized()


def test_several_processes_meet_by_the_backend_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(world, "_device_of", lambda place: met.append(place) or torch.device("cuda", place))
    monkeypatch.setattr(world, "_meet", lambda backend, timeout: met.append(backend))
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for given in (None, "nccl", "cuda:nccl", "gloo"):
        deepspeed.init_distributed(given)
    assert met == [1, "cpu:gloo,cuda:nccl", 1, "cpu:gloo,cuda:nccl", 1, "cuda:nccl", "gloo"]


def test_each_adam_is_an_instance_of_deepspeeds_adam() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    coupled = deepspeed.ops.adam.FusedAdam(parameters, adam_w_mode=False)
    assert type(coupled) is torch.optim.Adam and isinstance(coupled, deepspeed.ops.adam.DeepSpeedCPUAdam)
    assert type(deepspeed.ops.adam.DeepSpeedCPUAdam(parameters)) is torch.optim.AdamW
    assert not isinstance(torch.optim.SGD(parameters), deepspeed.ops.adam.FusedAdam)
    for kind, is_adam in (("Adam", True), ("SGD", False)):
        config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.1}}}
        optimizer = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[1]
        assert isinstance(optimizer, deepspeed.ops.adam.FusedAdam) is is_adam


def test_programs_may_remove_the_hooks_of_zero3_while_a_model_generates() -> None:
    """As TRL does around ``generate`` (the names are DeepSpeed's); a step follows."""
    model = torch.nn.Linear(3, 2)
    engine: Any = deepspeed.initialize(model=model, config=ZERO_3)[0]
    assert engine.optimizer.optimizer is engine.optimizer
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        offload = engine.optimizer.parameter_offload
        for _, parameter in (*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()):
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        inside = model(torch.ones(1, 3))
        offload._register_deepspeed_module(offload.module)
    assert torch.equal(engine(torch.ones(1, 3)), inside)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert not torch.equal(engine(torch.ones(1, 3)), inside)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizer_has_the_master_weights_of_this_process(stage: int) -> None:
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}, {"params": []}]
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    engine: Any = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]
    engine.backward(engine(torch.ones(1, 3).bfloat16()).float().sum())
    engine.step()
    whole = [deepspeed.utils.safe_get_full_fp32_param(one).flatten() for one in engine.module.parameters()]
    assert all(map(torch.equal, engine.optimizer.fp32_partitioned_groups_flat, [*whole, torch.empty(0)]))
    assert [len(one) for one in engine.optimizer.fp32_partitioned_groups_flat] == [6, 2, 0]
    assert not torch.equal(whole[0], whole[0].bfloat16().float())  # masters, and not the model's parameters
    assert engine.sparse_tensor_module_names == set() and engine.empty_partition_cache() is None
    engine.destroy()
