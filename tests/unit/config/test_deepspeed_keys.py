"""Keys of DeepSpeed's with the values that published files give them: formats, ZeRO, offload, optimizers, schedules."""

import math
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import OptimizerConfig
from gptpar.config.deepspeed_rules import Door
from gptpar.config.deepspeed_table import TABLE
from gptpar.optim.schedule import make_schedule
from tests.unit.config.deepspeed_files import BATCH, RATE, parsed_with, problems, resolved

NO_SUCH_KEY = "DeepSpeed has no such key, and ignores it"
MEASURED = "iteration time and throughput are always measured; see gptpar benchmark --breakdown"
ZERO = "zero_optimization"
APART = {"data_routing": {"enabled": False}, "data_sampling": {"enabled": False}}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({"torch_autocast": {"enabled": False}}, "torch_autocast: it is off"),
        ({"data_efficiency": {"enabled": True, **APART}}, "data_efficiency: it is off"),
        ({"tensor_parallel": {"autotp_size": 1}}, "tensor_parallel: it is off"),
        ({"tensorboard": {"enabled": False, "output_path": "x"}}, "tensorboard: it is off"),
        ({"wandb": {"enabled": False, "project": "p"}}, "wandb: it is off"),
        ({"amp": {"enabled": False}}, "amp: it is off"),
        ({"fp16": {"enabled": False, "opt_level": "O2"}}, "fp16.opt_level: it is for Apex (amp), which DeepSpeed does"),
        ({"timers": {"throughput": {"enabled": True}}}, f"timers: {MEASURED}"),
        ({"wall_clock_breakdown": False}, f"wall_clock_breakdown: {MEASURED}"),
        ({"pipeline": {"num_stages": 2}}, f"pipeline.num_stages: {NO_SUCH_KEY}"),
        ({"a_key_of_nobody": 3}, f"a_key_of_nobody: {NO_SUCH_KEY}"),
        ({"scheduler": {"params": {"warmup_num_steps": 10}}}, "scheduler.params: there is no scheduler.type"),
        ({"scheduler": {"type": None, "params": {"last": 1}}}, "scheduler.params: there is no scheduler.type"),
        ({"prescale_gradients": True}, "prescale_gradients: the loss is divided before the backward pass"),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype: gradients are always summed in fp32",
        ),
        ({f"{ZERO}.reduce_bucket_size": 64}, f"{ZERO}.reduce_bucket_size: sizes of messages are chosen here"),
        (
            {ZERO: {"stage3_max_live_parameters": 1e9}},
            f"{ZERO}.stage3_max_live_parameters: sizes of messages are chosen",
        ),
        ({ZERO: {"zero_hpz_partition_size": 8}}, f"{ZERO}.zero_hpz_partition_size: parameters are divided over all"),
    ],
)
def test_what_is_off_or_harmless_is_told_with_its_reason_and_changes_nothing(
    folder: Path, file: dict[str, Any], told: str
) -> None:
    assert resolved({**BATCH, **RATE, **file})[0] == resolved({**BATCH, **RATE})[0]
    (reason,) = parsed_with({**BATCH, **RATE, **file}).without_effect
    assert reason.startswith(told)


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
    (told, _) = parsed_with(file).without_effect
    assert told.endswith("partition_activations: nothing is recomputed without --recompute-granularity full")
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
    assert parsed_with({**BATCH, **RATE, "communication_data_type": "bf16"}).flags.parallel.grad_reduce_in_bf16


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


def test_an_optimizer_without_weight_decay_has_none_as_in_deepspeed(folder: Path) -> None:
    config, derived = resolved({**BATCH, **RATE})
    assert config.optimizer.weight_decay == 0.0
    assert derived["weight decay"].reason.endswith("absent, so DeepSpeed's default")
    assert derived["clip grad"].value == 1.0
    assert "default since its 0.19.3" in derived["clip grad"].reason and "write 0.0" in derived["clip grad"].reason
    config, derived = resolved({**BATCH, **RATE}, "--weight-decay 0.2 --clip-grad 0.5")
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.2, 0.5)
    assert "weight decay" not in derived


def test_flags_make_the_optimizer_where_they_give_its_rate(folder: Path) -> None:
    """As in Megatron-DeepSpeed, which hands DeepSpeed an optimizer made from flags: the file's is not read."""
    for kind in ("AdamW", "Lion", "OneBitAdam"):
        params = {"lr": 6e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3, "max_grad_norm": 0.5}
        file = {**BATCH, "optimizer": {"type": kind, "params": params}}
        config, derived = resolved(file, "--lr 1e-4 --adam-beta2 0.95")
        ours = config.optimizer
        assert (ours.optimizer, ours.lr, ours.adam_beta1, ours.adam_beta2) == ("adam", 1e-4, 0.9, 0.95)
        assert (ours.adam_eps, ours.weight_decay, ours.clip_grad) == (1e-8, 0.01, 1.0)
        assert "weight decay" not in derived
        (told,) = parsed_with(file, "--lr 1e-4").without_effect
        assert told.startswith("optimizer: --lr 0.0001 is given") and "so flags make the optimizer" in told


def linear(kind: str, **params: object) -> dict[str, Any]:
    params = {"warmup_type": "linear", "warmup_num_steps": 100, **params}
    return {**BATCH, **RATE, "scheduler": {"type": kind, "params": params}}


def rates(file: dict[str, Any], *steps: int) -> list[float]:
    config, _ = resolved(file)
    schedule = make_schedule(config, 5000 * 32)
    return [schedule.learning_rate(step * 32) for step in steps]


def test_warmup_then_constant_or_linear_decay_to_where_it_began(folder: Path) -> None:
    assert rates(linear("WarmupLR"), 0, 1, 51, 101, 4999) == pytest.approx([0, 0, 3e-4, 6e-4, 6e-4])
    file = linear("WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4)
    assert rates(file, 0, 51, 4999) == pytest.approx([1e-4, 3e-4, 5e-4])
    assert "optimizer.params.lr: scheduler.params.warmup_max_lr is the peak" in parsed_with(file).without_effect
    file = linear("WarmupDecayLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4, total_num_steps=1100)
    assert rates(file, 0, 101, 601, 1101, 2000) == pytest.approx([1e-4, 5e-4, 3e-4, 1e-4, 1e-4])


def test_warmup_then_cosine_in_shares_of_the_peak(folder: Path) -> None:
    file = linear("WarmupCosineLR", warmup_min_ratio=0.5, cos_min_ratio=0.1, total_num_steps=1100)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    found = rates(file, 0, 1, 350, 600, 1100)
    assert found == pytest.approx([0, 3e-4, quarter * 6e-4, 0.55 * 6e-4, 6e-5])
    _, derived = resolved(file)
    ratio = derived["cos min ratio"]
    assert (ratio.value, ratio.reason) == (0.1, "ds.json: scheduler.params.cos_min_ratio")
    assert rates(linear("WarmupCosineLR", total_num_steps=1100), 1100) == pytest.approx([6e-8])


def optimizer(kind: str, **params: object) -> dict[str, Any]:
    return {**BATCH, "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


@pytest.mark.parametrize(
    ("file", "flags", "told"),
    [
        (
            optimizer("Lamb", max_coeff=0.3),
            "",
            'type is "Lamb", and gptpar\'s optimizers are AdamW, Lion and Muon: set',
        ),
        (
            optimizer("Adam", adam_w_mode=False, weight_decay=0.1),
            "",
            "adam_w_mode is false: Adam would add the weight d",
        ),
        (
            linear("WarmupDecayLR", total_num_steps=9),
            "",
            "warmup_max_lr is absent, so DeepSpeed would train at 0.001 and",
        ),
        (linear("WarmupLR"), "--lr-decay-style cosine", "--lr-decay-style cosine is given, too, and DeepSpeed follows"),
    ],
)
def test_what_gptpars_optimizer_and_schedule_cannot_be(
    folder: Path, file: dict[str, Any], flags: str, told: str
) -> None:
    (problem,) = problems(file, flags)
    assert problem.startswith("ds.json: ") and told in problem


def muon(params: dict[str, Any]) -> OptimizerConfig:
    """The optimizer of a run with this Muon."""
    return resolved({**BATCH, "optimizer": {"type": "Muon", "params": params}})[0].optimizer


def test_it_has_deepspeeds_settings(folder: Path) -> None:
    o = muon({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_method": "gram"})
    assert (o.optimizer, o.lr, o.muon_lr, o.weight_decay, o.muon_momentum) == ("muon", 0.02, 0.02, 0.1, 0.9)
    assert (o.muon_coefficient_type, o.muon_num_ns_steps, o.muon_scale_mode) == ("simple", 5, "shape_scaling")
    assert (o.muon_extra_scale_factor, o.muon_nesterov, o.muon_qkv) == (1.0, True, "split")
    assert (o.adam_beta1, o.adam_beta2, o.adam_eps) == (0.9, 0.95, 1e-10)


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({"lr": 1e-3}, (1e-3, 1e-3)),
        ({"lr": 1.0, "adam_lr": 3e-4, "muon_lr": 0.02}, (3e-4, 0.02)),
        ({"adam_lr": 3e-4, "muon_lr": 0.02, "per_head_muon": True}, (3e-4, 0.02)),
    ],
)
def test_rates_of_one_kind_overrule_the_rate_of_both(
    folder: Path, params: dict[str, Any], rates: tuple[float, float]
) -> None:
    o = muon(params)
    assert (o.lr, o.muon_lr) == rates
    assert o.muon_qkv == ("heads" if "per_head_muon" in params else "split")
