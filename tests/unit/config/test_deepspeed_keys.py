"""Keys of DeepSpeed's with the kinds of values that published files give them: what each comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptpar.config.deepspeed_rules import Door
from gptpar.config.deepspeed_table import TABLE
from tests.unit.config.deepspeed_files import BATCH, RATE, parsed_with, problems, resolved

OFF = [
    {"comms_logger": {"enabled": False}},
    {"torch_autocast": {"enabled": False}},
    {"dataloader_drop_last": False},
    {"zero_optimization.reduce_bucket_size": 64},
    {"data_efficiency": {"enabled": True, "data_routing": {"enabled": False}, "data_sampling": {"enabled": False}}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"tensor_parallel": {"enabled": False}},
    {"fp16": {"enabled": False, "fp16": True}},
    {"cuda_visible_devices": "0,1"},
    {"monitor_config": {"enabled": False}},
    {"nebula": {"enabled": False}},
    {"timers": {"throughput": {"enabled": True}}},
    {"zero_optimization": {"memory_efficient_linear": False}},
    {"zero_optimization": {"all_reduce_bucket_size": 5e8}},
    {"zero_optimization": {"legacy_stage1": False}},
    {"activation_checkpointing": {"num_checkpoints": 4}},
    {"csv_monitor": {"enabled": False, "output_path": "x"}},
    {"tensorboard": {"enabled": False}},
    {"wandb": {"enabled": False, "project": "p"}},
    {"a_key_of_nobody": 3},
]


@pytest.mark.parametrize("file", OFF, ids=str)
def test_what_is_off_or_harmless_is_told_once_and_changes_nothing(folder: Path, file: dict[str, Any]) -> None:
    config, _ = resolved({**BATCH, **RATE, **file})
    assert config == resolved({**BATCH, **RATE})[0]
    told = parsed_with({**BATCH, **RATE, **file}).without_effect
    (first,) = file
    assert len([note for note in told if note.startswith(first)]) == 1, told


def test_monitors_and_the_profiler_do_what_they_say(folder: Path) -> None:
    file = {
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "mine"},
        "wandb": {"enabled": True, "project": "p", "team": "t"},
        "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "mine"},
        "flops_profiler": {"enabled": True, "profile_step": 5},
    }
    log = resolved({**BATCH, **RATE, **file})[0].logging
    assert (log.tensorboard_dir, log.csv_dir, log.log_throughput) == ("out/mine", "out/mine", True)
    assert (log.wandb_project, log.wandb_entity, log.wandb_group) == ("p", "t", None)
    by_both = resolved({**BATCH, **RATE, "wandb": {"enabled": True}}, "--wandb-entity e")[0].logging
    assert (by_both.wandb_project, by_both.wandb_entity) == ("deepspeed", "e")
    assert (
        resolved({**BATCH, **RATE, "tensorboard": {"enabled": True}})[0].logging.tensorboard_dir == "DeepSpeedJobName"
    )
    (told,) = problems({**BATCH, **RATE, **file}, "--wandb-project q")
    assert told.endswith("but --wandb-project q is given, too: drop one of them, or make them agree.")


def test_activation_checkpointing_says_how_and_not_what(folder: Path) -> None:
    file = {**BATCH, **RATE, "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    assert resolved(file)[0] == resolved({**BATCH, **RATE})[0]
    r = resolved(file, "--checkpoint-activations")[0].recompute
    assert (r.checkpoint_in_cpu, r.distribute_saved_activations) == (True, False)
    r = resolved(file, "--checkpoint-activations --tensor-model-parallel-size 2")[0].recompute
    assert (r.checkpoint_in_cpu, r.distribute_saved_activations) == (True, True)
    file["activation_checkpointing"] = {"cpu_checkpointing": False}
    assert resolved(file, "--checkpoint-activations --checkpoint-in-cpu")[0].recompute.checkpoint_in_cpu


def test_the_file_decides_on_the_number_format_and_the_loss_scale(folder: Path) -> None:
    both = {"fp16": {"enabled": False, "initial_scale_power": 11}, "bf16": {"enabled": True}}
    assert resolved({**BATCH, **RATE, **both}, "--fp16")[0].precision.dtype == "bf16"
    assert "--fp16: ds.json decides on the number format, as with DeepSpeed" in (
        parsed_with({**BATCH, **RATE, **both}, "--fp16").without_effect
    )
    file = {**BATCH, **RATE, "fp16": {"enabled": True, "initial_scale_power": 12}}
    p = resolved(file, "--fp16 --loss-scale 12 --hysteresis 4")[0].precision
    assert (p.loss_scale, p.initial_loss_scale, p.hysteresis) == (None, 4096.0, 4)
    assert parsed_with(file, "--fp16 --loss-scale 12").without_effect == [
        "--loss-scale 12.0: ds.json decides on the loss scale, as with DeepSpeed"
    ]
    assert resolved({**BATCH, **RATE}, "--fp16 --loss-scale 12")[0].precision.loss_scale == 12


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, 'ds.json: optimizer.type is "Lamb", and gptpar\'s'),
        ({"offload_optimizer": {}}, "ds.json: offload_optimizer is unknown; did you mean zero_optimization.offload_o"),
        ({"tensor_parallel": {"autotp_size": 4}}, "ds.json: tensor_parallel: tensor parallelism by this file"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "ds.json: fp16.enabled and bf16.enabled exclude each"),
        ({"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}}, "ds.json: data_efficiency: curri"),
        ({"zero_optimization": {"stage": 4}}, "ds.json: zero_optimization.stage is 4; it must be at most 3."),
    ],
)
def test_what_is_refused_is_told_once_by_its_key(folder: Path, file: dict[str, Any], expected: str) -> None:
    (told,) = problems({**BATCH, **RATE, **file})
    assert told.startswith(expected)


def test_what_deepspeed_does_not_read_or_turn_on_is_named_alone(folder: Path) -> None:
    file = {
        "micro_batch_size_per_gpu": "auto",
        "optimizer": {**RATE["optimizer"], "remark": 1},
        "sparse_attention": {"mode": "dense", "block": 16},
        "checkpointing": {"enabled": True, "save_n_recent_checkpoints": 5},
    }
    parsed = parsed_with({**BATCH, **RATE, **file}, "")
    assert not parsed.problems
    assert parsed.without_effect == [
        "optimizer.remark: DeepSpeed has no such key, and ignores it",
        "micro_batch_size_per_gpu: DeepSpeed has no such key, and ignores it",
        "sparse_attention: it is off",
        "checkpointing: DeepSpeed has no such key, and ignores it",
    ]
    assert problems({**BATCH, **RATE, "micro_batch_size_per_gpu": 2, "sparse_attention": {"mode": "fixed"}}) == [
        "ds.json: micro_batch_size_per_gpu is unknown; did you mean train_micro_batch_size_per_gpu?",
        "ds.json: sparse_attention: sparse attention is not part of gptpar; leave it out.",
    ]


@pytest.mark.parametrize(("said", "stage"), [(True, 1), (False, 0)])
def test_the_first_form_of_zero_is_its_first_stage(folder: Path, said: bool, stage: int) -> None:
    assert resolved({**BATCH, **RATE, "zero_optimization": said})[0].parallel.zero_stage == stage


def test_every_key_has_one_rule_at_a_door() -> None:
    for door in Door:
        places = [(key.path, kind) for key in TABLE if key.rule(door) for kind in key.of or ("",)]
        assert len(places) == len(set(places))


def test_keys_of_older_versions_of_deepspeed_are_read_as_they_read_them(folder: Path) -> None:
    sections = {
        "bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "fp16": {"enabled": False, "dynamic_loss_scale": True},
        "checkpoint": {"tag_validation_mode": "WARN", "load_universal": False},
        "aio": {"block_count": 4},
    }
    parsed = parsed_with({**BATCH, **RATE, **sections}, "")
    assert not parsed.problems and parsed.flags.precision.bf16
    assert parsed.without_effect == [
        "bf16.loss_scale: fp16 alone has a loss scale",
        "bf16.initial_scale_power: fp16 alone has a loss scale",
        "bf16.hysteresis: fp16 alone has a loss scale",
        "fp16.dynamic_loss_scale: fp16.loss_scale says it: 0, which is its default, is dynamic",
        "checkpoint.tag_validation_mode: DeepSpeed has no such key, and ignores it",
        "checkpoint.load_universal: checkpoints load into any layout; see --save and --load",
        "aio.block_count: DeepSpeed has no such key, and ignores it",
        "aio: the operating system reads ahead and writes back",
    ]


@pytest.mark.parametrize(("word", "sent"), [("fp32", False), ("fp16", False), ("bf16", True), ("bfp16", True)])
def test_gradients_are_sent_in_the_format_asked_for_or_a_wider_one(folder: Path, word: str, sent: bool) -> None:
    file = {**BATCH, **RATE, "bf16": {"enabled": True}, "communication_data_type": word}
    assert resolved(file)[0].parallel.grad_reduce_in_bf16 is sent
    told = "communication_data_type: gradients are sent in fp32"
    assert (told in parsed_with(file, "").without_effect) == (word == "fp16")


@pytest.mark.parametrize(("word", "meant"), [("true", True), ("True", True), ("yes", True), ("off", False)])
def test_sections_that_deepspeed_checks_take_true_and_false_as_texts(folder: Path, word: str, meant: bool) -> None:
    config = resolved({**BATCH, **RATE, "bf16": {"enabled": word}, "zero_optimization": {"cpu_offload": word}})[0]
    assert (config.precision.dtype == "bf16", config.offload.cpu_optimizer) == (meant, meant)
    parsed = parsed_with({**BATCH, **RATE, "tensorboard": {"enabled": word}}, "")
    assert (parsed.flags.logging.tensorboard_dir is not None) == meant
