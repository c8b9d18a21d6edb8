"""What ``gptpar.initialize`` is told by its configuration."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.adapter.options import EngineOptions, SchedulerOptions, read_options
from gptpar.adapter.step_batch import StepBatch
from gptpar.config import OffloadConfig
from gptpar.config.deepspeed_rules import Absent, Door, NotRead, Tree
from gptpar.config.deepspeed_table import SCHEDULE_TYPES, TABLE, keys_for
from gptpar.errors import ConfigError
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.loss_scale import LossScale

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ds_config_offload.json"
BATCH = {"train_micro_batch_size_per_gpu": 2}


def options(world: int = 1, **keys: Any) -> EngineOptions:
    return read_options({**BATCH, **keys}, world=world)


def problems(config: Any, args: object = None, world: int = 4) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_options(config, args, world=world)
    return caught.value.problems


# --- where it comes from --------------------------------------------------------------------------------------------


def test_a_path_a_dictionary_and_a_scripts_arguments_say_the_same() -> None:
    args = argparse.Namespace(deepspeed_config=str(EXAMPLE), deepspeed=True)
    by_args = read_options(None, args, world=4)
    assert by_args == read_options(EXAMPLE, world=4) == read_options(str(EXAMPLE), argparse.Namespace(), world=4)
    assert by_args.batch == StepBatch(32, 4, 2) and by_args.zero_stage == 3 and by_args.dtype is torch.bfloat16
    assert by_args.offload == OffloadConfig(cpu_optimizer=True, cpu_optimizer_ratio=0.3)
    assert by_args.optimizer == AdamHyperparameters(3e-4, 0.9, 0.95, 1e-8, 0.1)
    assert (by_args.max_norm, by_args.steps_per_print, by_args.scheduler) == (1.0, 10, None)


@pytest.mark.parametrize(
    ("config", "args", "expected"),
    [
        (None, argparse.Namespace(), "gptpar.initialize is configured neither by config nor by args.deepspeed_config"),
        (BATCH, argparse.Namespace(deepspeed_config="ds.json"), "gptpar.initialize is configured both by config and "),
        (3, None, "config is of type int: a path or a dictionary is needed."),
        ("no.json", None, "no.json: cannot be read (No such file or directory): name a file."),
        ({**BATCH, "gradient_clipping": math.inf}, None, "config: gradient_clipping is Infinity: a number is needed."),
        ({"a": torch.float32}, None, "config: Object of type dtype is not JSON serializable"),
    ],
)
def test_what_is_no_configuration(config: Any, args: object, expected: str) -> None:
    (problem,) = problems(config, args)
    assert problem.startswith(expected)


def test_the_smallest_configuration_is_complete() -> None:
    found = options(world=2)
    assert found.batch == StepBatch(4, 2, 1) and found.loss_scale == LossScale(1.0, dynamic=False)
    assert found.dtype is found.optimizer is found.scheduler is None and found.offload == OffloadConfig()
    assert (found.zero_stage, found.max_norm, found.steps_per_print, found.seed) == (0, 1.0, 0, 1234)
    assert (found.compile, found.step_graph, found.units) == ("auto", "auto", ())
    assert (found.ignore_unused, found.tag_validation, found.skip_step) == (True, "warn", (None, 128))
    assert found.drop_last and not (found.cast_inputs or found.reduce_in_bf16 or found.async_save)
    reasons = {one.name: one.reason for one in found.derived}
    assert reasons["clip grad"].startswith("gradient_clipping; absent, so DeepSpeed's default since its 0.19.3 (change")
    assert options(gradient_clipping=0.0).max_norm == 0.0
    assert options(optimizer={"type": "Adam", "params": {"max_grad_norm": 0.3}}).max_norm == 0.3
    by_pair = options(optimizer={"type": "AdamW", "params": {"betas": (0.8, 0.9)}}).optimizer
    assert by_pair == AdamHyperparameters(1e-3, 0.8, 0.9, 1e-8, 0.0)


def test_our_own_section() -> None:
    section = {"compile": True, "units": ["GPT2Block"], "step_graph": False, "speculation": "off", "threads": 3}
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found = options(gptpar={**section, "seed": 7}, zero_optimization=offload)
    assert (found.compile, found.units, found.step_graph, found.seed) == ("on", ("GPT2Block",), "off", 7)
    on_cpu = OffloadConfig(cpu_optimizer=True, cpu_parameters=True)
    assert found.offload == dataclasses.replace(on_cpu, offload_speculation="off", cpu_optimizer_threads=3)
    zero = {"offload_optimizer": {"device": "cpu"}}
    for said, meant in ((True, "on"), (False, "off"), ("on", "on"), ("off", "off"), ("auto", "auto")):
        found = options(gptpar={"step_graph": said, "speculation": said}, zero_optimization=zero)
        assert (found.step_graph, found.offload.offload_speculation) == (meant, meant)
    assert options(gptpar={"threads": 3}).without_effect == ("gptpar.threads: nothing is offloaded",)


# --- batches --------------------------------------------------------------------------------------------------------


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("absent", ["auto", None])
def test_two_of_three_sizes_say_the_third(absent: Any) -> None:
    for train, micro, steps in ((32, 2, 4), (32, 2, absent), (32, absent, 4), (absent, 2, 4)):
        file = dict(zip(SIZES, (train, micro, steps), strict=True))
        assert read_options(file, world=4).batch == StepBatch(32, 2, 4)
    assert read_options({SIZES[0]: 32, SIZES[2]: absent}, world=4).batch == StepBatch(32, 8, 1)
    assert read_options({SIZES[1]: 2, SIZES[2]: absent}, world=4).batch == StepBatch(8, 2, 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 2, 4), f"{SIZES[0]} 64 is not {SIZES[1]} 2 x {SIZES[2]} 4 x 4 data-parallel process(es) = 32: drop one"),
        ((40, None, 3), f"{SIZES[0]} 40 is not a multiple of {SIZES[2]} 3 x 4 data-parallel process(es) = 12: the ne"),
        ((34, 2, None), f"{SIZES[0]} 34 is not a multiple of {SIZES[1]} 2 x 4 data-parallel process(es) = 8: the near"),
        ((None, None, 4), f"the batch size is missing: give {SIZES[0]} or {SIZES[1]}."),
        ((None, 2, 0), f"{SIZES[2]} is 0; it must be at least 1."),
        ((None, 2.5, None), f"{SIZES[1]} is 2.5: a whole number is needed."),
    ],
)
def test_sizes_that_contradict_each_other(sizes: tuple[Any, Any, Any], expected: str) -> None:
    (problem,) = problems(dict(zip(SIZES, sizes, strict=True)))
    assert problem.startswith(f"config: {expected}")


# --- number formats -------------------------------------------------------------------------------------------------


def test_number_formats_scale_losses_and_cast_inputs_and_messages() -> None:
    found = options(fp16={"enabled": True, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2})
    assert found.dtype is torch.float16 and not found.cast_inputs
    assert found.loss_scale == LossScale(65536.0, dynamic=True, minimum=2, window=500, hysteresis=3, tolerance=3)
    found = options(fp16={"enabled": True, "loss_scale": 128, "auto_cast": True})
    assert found.loss_scale == LossScale(128.0, dynamic=False) and found.cast_inputs
    found = options(bf16={"enabled": True, "auto_cast": True}, communication_data_type="bf16")
    assert found.dtype is torch.bfloat16 and found.cast_inputs and found.reduce_in_bf16
    assert options(bf16={"enabled": False, "auto_cast": True}).cast_inputs is False
    told = options(data_types={"grad_accum_dtype": "bf16", "param_dtype": "fp32"}).without_effect
    assert "data_types.grad_accum_dtype: gradients are always summed in fp32" in told


# --- optimizer and schedule -----------------------------------------------------------------------------------------


def test_the_schedule_has_deepspeeds_defaults() -> None:
    rates = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
    found = options(**rates, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3}})
    assert found.scheduler == SchedulerOptions(
        "WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-3, "warmup_num_steps": 1000, "warmup_type": "log"}
    )
    assert found.optimizer is not None and found.optimizer.lr == 5e-4  # for a client's scheduler, which goes before
    by_group = {"warmup_min_lr": [0, 1e-5], "warmup_type": "linear", "total_num_steps": 10, "warmup_max_lr": 1e-3}
    found = options(scheduler={"type": "WarmupDecayLR", "params": by_group})
    assert found.scheduler is not None and found.scheduler.params["warmup_min_lr"] == (0, 1e-5)
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
    with pytest.warns(UserWarning, match="DeepSpeed would train at 0.001 and not at optimizer.params.lr 0.0005: give"):
        found = options(**rates, scheduler=decay)
    assert found.scheduler is not None and found.scheduler.params["warmup_max_lr"] == 0.001


def test_everything_wrong_is_told_at_once() -> None:
    config = {
        "train_batch_size": 3,
        "fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 2},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb"},
        "scheduler": {"type": "StepLR", "params": {"step_size": 0}},
        "zero_optimization": {"stage": 4, "offload_optimizer": {"device": "nvme", "ratio": 1.5}},
        "dataloader_drop_last": 0,
        "gptpar": {"compil": True, "units": "Block", "step_graph": 1, "speculation": "maybe"},
        "elasticity": {"enabled": True},
    }
    expected = [
        "optimizer.type is \"Lamb\", and gptpar's optimizers are AdamW, Lion and Muon (and torch's sgd, adagrad, ",
        'scheduler.type is "StepLR": only WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest can be made',
        "zero_optimization.offload_optimizer.ratio is 1.5: a number from 0 to 1 is needed.",
        "dataloader_drop_last is 0: true or false is needed.",
        "gptpar.compil is unknown; did you mean gptpar.compile?",
        'gptpar.units is "Block": a list of class names is needed, for example ["GPT2Block"].',
        'gptpar.step_graph is 1: true, false or "auto" is needed.',
        'gptpar.speculation is "maybe": true, false or "auto" is needed.',
        "elasticity: elastic training is not part of gptpar; leave it out.",
        "fp16 and bf16 are both enabled: choose one number format.",
        "fp16.initial_scale_power: the scale begins at 1, below min_loss_scale 2: raise it, or lower min_loss_scale.",
        "zero_optimization.stage is 4; it must be at most 3.",
        "zero_optimization.offload_optimizer.nvme_path is missing: the folder in which the optimizer's state is kept.",
        "train_batch_size 3 is not a multiple of gradient_accumulation_steps 1 x 2 data-parallel process(es) = 2: ",
    ]
    for problem, start in zip(problems(config, world=2), expected, strict=True):
        assert problem.startswith(f"config: {start}")


def test_contradictions_within_the_optimizer_and_the_schedule() -> None:
    optimizer = {"type": "Adam", "params": {"lr": 2e-3, "weight_decay": 0.1, "adam_w_mode": False, "eps": 0}}
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_type": "cubic", "warmup_max_lr": 2e-3}}
    assert problems({**BATCH, "optimizer": optimizer, "scheduler": scheduler, "gradient_clipping": -1}) == [
        "config: scheduler.params.total_num_steps is missing: the number of steps until the lowest rate.",
        'config: scheduler.params.warmup_type is "cubic": one of log, linear is needed.',
        "config: gradient_clipping is -1; it must be at least 0.",
        "config: optimizer.params.eps is 0; it must be more than 0.",
    ]


# --- offload --------------------------------------------------------------------------------------------------------


def test_state_on_a_disk_needs_its_folder(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.25}
    assert options(zero_optimization={"stage": 2, "offload_optimizer": nvme}).offload == OffloadConfig(
        cpu_optimizer=True, cpu_optimizer_ratio=0.25, optimizer_nvme_path=str(tmp_path)
    )
    nvme["nvme_path"] = "/no/such"
    file = {**BATCH, "zero_optimization": {"offload_optimizer": nvme}, "gptpar": {"speculation": "on"}}
    assert problems(file) == [
        'config: zero_optimization.offload_optimizer.nvme_path is "/no/such", which is not a folder.',
        'config: gptpar.speculation is "on": it needs a second copy of the state in memory, which '
        'zero_optimization.offload_optimizer.device "nvme" avoids; drop one of them.',
    ]


# --- one tree -------------------------------------------------------------------------------------------------------


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, rule) of each value."""
    for name, rule in tree.items():
        if isinstance(rule, Mapping):
            yield from leaves(rule, f"{prefix}{name}.")
        else:
            yield prefix + name, rule


def test_the_keys_are_those_of_the_command_line_and_our_own() -> None:
    known = set()
    for section, kinds in (("scheduler", [*SCHEDULE_TYPES.values()]), ("optimizer", [None, "Lion", "Muon"])):
        for kind in kinds:
            file = {section: {"type": kind}} if kind else {}
            engine = {key for key, _ in leaves(keys_for(file, Door.ENGINE))}
            pretrain = {key for key, _ in leaves(keys_for(file, Door.PRETRAIN))}
            assert pretrain < engine and all(key.startswith("gptpar.") for key in engine - pretrain)
            known |= engine
    assert known == {row.path for row in TABLE} | {"scheduler.params"}


def test_no_reason_names_a_flag_of_the_command_line() -> None:
    rules = [rule for _, rule in leaves(keys_for({"scheduler": {"type": "WarmupLR"}}, Door.ENGINE))]
    told = [rule.what if isinstance(rule, Absent) else rule.why for rule in rules if not isinstance(rule, NotRead)]
    assert not [why for why in told if "--" in why or "GPT" in why]
    assert len(told) > 100


def test_number_formats_tags_and_unused_parameters() -> None:
    wrong = {
        "data_types": {"grad_accum_dtype": "fp8", "param_dtype": "bf16", "buffer_dtype": "fp64"},
        "checkpoint": {"tag_validation": "maybe"},
        "gradient_allreduce_op": "max",
        "zero_optimization": {"stage": 1, "ignore_unused_parameters": 3},
    }
    assert problems({**BATCH, **wrong}) == [
        'config: data_types.grad_accum_dtype is "fp8": one of fp32, fp16, bf16 is needed.',
        'config: data_types.buffer_dtype is "fp64": one of fp32, fp16, bf16 is needed.',
        'config: checkpoint.tag_validation is "maybe": Ignore, Warn or Fail is needed.',
        'config: gradient_allreduce_op is "max": one of mean, sum is needed.',
        "config: zero_optimization.ignore_unused_parameters is 3: true or false is needed.",
        'config: data_types.param_dtype is "bf16", and fp16 and bf16 say fp32: make them agree.',
    ]
    assert not options(zero_optimization={"stage": 1, "ignore_unused_parameters": False}).ignore_unused
    for formats, expected in (({}, None), ({"bf16": {"enabled": True}}, torch.float16)):
        assert options(data_types={"buffer_dtype": "fp16"}, **formats).buffer_dtype == expected
    for word in ("Fail", "IGNORE"):
        assert options(checkpoint={"tag_validation": word}).tag_validation == word.lower()
