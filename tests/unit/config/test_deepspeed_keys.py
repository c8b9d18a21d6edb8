"""Keys of DeepSpeed's with the kinds of values that published files give them; formats, ZeRO and offload."""

from pathlib import Path
from typing import Any

import pytest

from gptpar.config.deepspeed_rules import Door
from gptpar.config.deepspeed_table import TABLE
from tests.unit.config.deepspeed_files import BATCH, RATE, parsed_with, problems, resolved

OFF = [
    {"torch_autocast": {"enabled": False}},
    {"zero_optimization.reduce_bucket_size": 64},
    {"data_efficiency": {"enabled": True, "data_routing": {"enabled": False}, "data_sampling": {"enabled": False}}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"timers": {"throughput": {"enabled": True}}},
    {"wandb": {"enabled": False, "project": "p"}},
    {"amp": {"enabled": False}},
    {"wall_clock_breakdown": False},
    {"pipeline": {"num_stages": 2}},
    {"scheduler": {"params": {"warmup_num_steps": 10}}},
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
    unnamed = resolved({**BATCH, **RATE, "tensorboard": {"enabled": True}})[0].logging
    assert unnamed.tensorboard_dir == "DeepSpeedJobName"
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


def test_every_key_has_one_rule_at_a_door() -> None:
    for door in Door:
        places = [(key.path, kind) for key in TABLE if key.rule(door) for kind in key.of or ("",)]
        assert len(places) == len(set(places))


def test_fp16_scales_as_in_deepspeed(folder: Path) -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    p = resolved({**BATCH, **RATE, "fp16": fp16})[0].precision
    assert p.dtype == "fp16" and p.loss_scale is None and p.initial_loss_scale == 65536
    assert (p.loss_scale_window, p.hysteresis, p.min_loss_scale) == (500, 3, 2)
    p = resolved({**BATCH, **RATE, "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8}})[0].precision
    assert (p.loss_scale, p.initial_loss_scale) == (128, 256)


def offload(**keys: object) -> dict[str, Any]:
    return {**BATCH, **RATE, "zero_optimization": {"stage": 2, "offload_optimizer": keys}}


def test_offload_of_the_optimizer(folder: Path) -> None:
    assert resolved(offload(device="cpu"))[0].offload.ratio == 1.0
    assert resolved(offload(device="cpu", ratio=0.25), "--cpu-optimizer-ratio 0.250")[0].offload.ratio == 0.25
    config, _ = resolved(offload(device="none", ratio=0.25))
    assert not config.offload.cpu_optimizer and config.parallel.zero_stage == 2
    assert resolved(offload(ratio=0.25), "--cpu-optimizer")[0].offload.ratio == 0.25
    legacy = {**BATCH, **RATE, "zero_optimization": {"cpu_offload": True}}
    assert resolved(legacy)[0].offload.cpu_optimizer
    zero_3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert resolved({**BATCH, **RATE, "zero_optimization": zero_3})[0].offload.cpu_parameters

    # its state on a disk
    config, _ = resolved(offload(device="nvme", nvme_path=str(folder)))
    assert config.offload.cpu_optimizer and config.offload.optimizer_nvme_path == str(folder)
    assert resolved(offload(device="cpu", nvme_path="/nowhere"))[0].offload.optimizer_nvme_path is None
    found = parsed_with(offload(device="cpu", nvme_path="/nowhere")).without_effect
    assert "zero_optimization.offload_optimizer.nvme_path: it is for NVMe" in found
