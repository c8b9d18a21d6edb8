"""DeepSpeed's JSON in place of flags."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import Config
from gptpar.config.derive import Derived
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.jsonc import JsonError, read_object
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.optim.schedule import make_schedule

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ds_config_offload.json"
MODEL = "--preset 124M --train-iters 5000 --mock-data --vocab-size 50257 --eval-iters 0"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
RATE = {"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named relative to it, so that sentences do not depend on where it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed_with(file: dict[str, Any] | str, flags: str = "") -> ParsedFlags:
    Path("ds.json").write_text(file if isinstance(file, str) else json.dumps(file))
    return parse_flags(f"{MODEL} --deepspeed --deepspeed_config ds.json {flags}".split())


def resolved(file: dict[str, Any] | str, flags: str = "", world: int = 4) -> tuple[Config, dict[str, Derived]]:
    config, derived = resolve(parsed_with(file, flags), world)
    return config, {d.name: d for d in derived}


def problems(file: dict[str, Any] | str, flags: str = "", world: int = 4) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(parsed_with(file, flags), world)
    return caught.value.problems


# --- the example ----------------------------------------------------------------------------------------------------


def test_the_example_resolves() -> None:
    parsed = parse_flags(f"{MODEL} --deepspeed --deepspeed_config {EXAMPLE}".split())
    config, derived = resolve(parsed, 4)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (32, 4)
    assert config.parallel.zero_stage == 3 and config.precision.dtype == "bf16"
    assert config.offload.cpu_optimizer and config.offload.ratio == 0.3
    o = config.optimizer
    assert (o.lr, o.adam_beta1, o.adam_beta2, o.adam_eps, o.weight_decay) == (3e-4, 0.9, 0.95, 1e-8, 0.1)
    assert (o.clip_grad, config.logging.log_interval) == (1.0, 10)
    reasons = {d.name: d.reason for d in derived}
    assert reasons["zero stage"] == f"{EXAMPLE}: zero_optimization.stage"
    assert reasons["cpu optimizer ratio"] == (
        f"{EXAMPLE}: zero_optimization.offload_optimizer.ratio; exact here: this share of the elements, at every ZeRO "
        "stage"
    )
    assert reasons["micro batches per step"] == "batch 32 / (micro-batch 4 x 4 data-parallel process(es))"
    assert [note.split(": ")[0] for note in parsed.without_effect] == [
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_allow_untested_optimizer",
    ]


# --- the flags ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--deepspeed", "--deepspeed needs --deepspeed_config FILE, DeepSpeed's JSON: give it, or drop --deepspeed."),
        ("--deepspeed_config ds.json", "--deepspeed_config ds.json is read with --deepspeed only: add it."),
        (
            "--deepspeed --deepspeed-config no.json",
            "--deepspeed_config no.json: cannot be read (No such file or directory): name a file.",
        ),
        ("--deepspeed --deepspeed_config .", "--deepspeed_config .: cannot be read (Is a directory): name a file."),
    ],
)
def test_flags_that_do_not_lead_to_a_file(folder: Path, flags: str, expected: str) -> None:
    assert parse_flags(flags.split()).problems == [expected]


def test_a_file_that_is_no_text_is_named(folder: Path) -> None:
    Path("ds.json").write_bytes(b'{"a\xff": 1}')
    assert parse_flags(["--deepspeed", "--deepspeed_config", "ds.json"]).problems == [
        "--deepspeed_config ds.json: byte 3 is not UTF-8: save it as text."
    ]


def test_help_tells_of_both_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    text = capsys.readouterr().out
    assert "--deepspeed-config FILE, --deepspeed_config FILE" in text and "--gradient-accumulation-steps N" in text


# --- JSON with comments ---------------------------------------------------------------------------------------------


def test_comments_and_trailing_commas() -> None:
    text = """\ufeff{ // one
      "a": [1, 2, /* three, */ ], # four ,}
      "b//c": "x # y, ] // \\" /* z */,}", /* "d": 1,
      */ "e": {"f": 5e8 , } , // last
    }"""
    assert read_object(text.removeprefix("\ufeff")) == {
        "a": [1, 2],
        "b//c": 'x # y, ] // " /* z */,}',
        "e": {"f": 5e8},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,\n // x\n "b" 2}', "line 3, column 6: Expecting ':' delimiter"),
        ('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}', "given twice in one object: c, a"),
        ("[1]", "an object in braces is needed"),
        ('{"a": [,]}', "line 1, column 8: Expecting value"),
        ('{"a": 1,,}', "line 1, column "),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": /* 1}', "line 1, column 7: Expecting value"),
        ('{"a": ' + "[" * 100_000 + "}", ""),
        ('{"a": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ("", "line 1, column 1: Expecting value"),
    ],
)
def test_text_that_cannot_be_read_is_told_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(JsonError) as caught:
        read_object(text)
    assert str(caught.value).startswith(expected)


def test_a_key_given_twice_is_a_problem_with_the_file(folder: Path) -> None:
    found = problems('{"train_batch_size": 8, "train_batch_size": 16}', "--lr 1e-3 --micro-batch-size 2")
    assert found == ["--deepspeed_config ds.json: given twice in one object: train_batch_size; correct it."]


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
        (32, 2, 4, (32, 2)),
        (32, 2, None, (32, 2)),
        (32, None, 4, (32, 2)),
        (None, 2, 4, (32, 2)),
        (32, None, None, (32, 8)),
        (None, 2, None, (8, 2)),
        (32, 2, "auto", (32, 2)),
        (32, "auto", "auto", (32, 8)),
    ],
)
def test_two_of_the_three_batch_sizes_say_the_third(
    folder: Path, train: object, micro: object, steps: object, expected: tuple[int, int]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file = {name: value for name, value in zip(names, (train, micro, steps), strict=True) if value is not None}
    config, _ = resolved({**file, **RATE})
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == expected


def test_batch_sizes_follow_the_number_of_data_parallel_processes(folder: Path) -> None:
    file = {"train_batch_size": 32, "gradient_accumulation_steps": 4, **RATE}
    config, derived = resolved(file, "--tensor-model-parallel-size 2", world=8)
    assert config.batch.micro_batch_size == 2
    assert derived["micro batch size"].reason == "batch 32 / (4 micro-batches x 4 data-parallel process(es))"
    config, derived = resolved({**BATCH, **RATE}, world=1)
    assert config.batch.global_batch_size == 8
    assert derived["global batch size"].reason == "micro-batch 2 x 1 data-parallel process(es) x 4 a step"


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (
            {"train_batch_size": 64, **BATCH},
            "",
            "--global-batch-size 64 is not --micro-batch-size 2 x --gradient-accumulation-steps 4 x 4 data-parallel "
            "process(es) = 32: drop one of the three, or make them agree.",
        ),
        (
            {"train_batch_size": 40, "gradient_accumulation_steps": 3},
            "",
            "--global-batch-size 40 is not a multiple of --gradient-accumulation-steps 3 x 4 data-parallel process(es) "
            "= 12, so there is no --micro-batch-size for it: change one of them.",
        ),
        (
            {"train_batch_size": 34, "train_micro_batch_size_per_gpu": 2},
            "",
            "--global-batch-size 34 is not a multiple of --micro-batch-size 2 x 4 data-parallel process(es) = 8: the "
            "nearest that fits is 32.",
        ),
        (
            BATCH,
            "--micro-batch-size 1",
            "ds.json: train_micro_batch_size_per_gpu is 2, but --micro-batch-size 1 is given, too: drop one of them, "
            "or make them agree.",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "",
            "--micro-batch-size is missing: the number of samples one process runs at once, for example 4.",
        ),
        ({**BATCH, "gradient_accumulation_steps": 0}, "", "--gradient-accumulation-steps is 0; it must be at least 1."),
    ],
)
def test_batch_sizes_that_contradict_each_other(folder: Path, file: dict[str, Any], flags: str, expected: str) -> None:
    assert problems({**file, **RATE}, flags) == [expected]


# --- optimizer and schedule -----------------------------------------------------------------------------------------


def test_an_optimizer_without_weight_decay_has_none_as_in_deepspeed(folder: Path) -> None:
    config, derived = resolved({**BATCH, **RATE})
    assert config.optimizer.weight_decay == 0.0
    assert derived["weight decay"].reason == (
        "ds.json: optimizer.params.weight_decay; of matrices, not of biases and norms; absent, so DeepSpeed's default"
    )
    assert (derived["clip grad"].value, derived["clip grad"].reason) == (
        1.0,
        "ds.json: gradient_clipping; absent, so DeepSpeed's default since its 0.19.3 (change of June 2026); before "
        "that it did not clip: write 0.0 to do as it did then",
    )
    config, derived = resolved({**BATCH, **RATE}, "--weight-decay 0.2 --clip-grad 0.5")
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.2, 0.5)
    assert "weight decay" not in derived


def linear(kind: str, **params: object) -> dict[str, Any]:
    params = {"warmup_type": "linear", "warmup_num_steps": 100, **params}
    return {**BATCH, **RATE, "scheduler": {"type": kind, "params": params}}


def rates(file: dict[str, Any], *steps: int) -> list[float]:
    config, _ = resolved(file)
    schedule = make_schedule(config, 5000 * 32)
    return [schedule.learning_rate(step * 32) for step in steps]


def test_warmup_then_constant(folder: Path) -> None:
    assert rates(linear("WarmupLR"), 0, 50, 100, 4999) == pytest.approx([0, 3e-4, 6e-4, 6e-4])
    file = linear("WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4)
    assert rates(file, 0, 50, 4999) == pytest.approx([1e-4, 3e-4, 5e-4])
    assert "optimizer.params.lr: scheduler.params.warmup_max_lr is the peak" in parsed_with(file).without_effect


def test_warmup_then_linear_decay_to_where_it_began(folder: Path) -> None:
    file = linear("WarmupDecayLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4, total_num_steps=1100)
    assert rates(file, 0, 100, 600, 1100, 2000) == pytest.approx([1e-4, 5e-4, 3e-4, 1e-4, 1e-4])


def test_warmup_then_cosine_in_shares_of_the_peak(folder: Path) -> None:
    file = linear("WarmupCosineLR", warmup_min_ratio=0.5, cos_min_ratio=0.1, total_num_steps=1100)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rates(file, 0, 100, 350, 600, 1100) == pytest.approx([3e-4, 6e-4, quarter * 6e-4, 0.55 * 6e-4, 6e-5])
    _, derived = resolved(file)
    assert derived["min lr"].reason == "ds.json: scheduler.params.cos_min_ratio; 0.1 x the peak 0.0006"
    assert rates(linear("WarmupCosineLR", total_num_steps=1100), 1100) == pytest.approx([6e-8])


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}},
            "--lr 1e-3",
            'ds.json: optimizer.type is "Lamb", and gptpar\'s optimizers are AdamW and Lion: set it to "AdamW" or '
            '"Lion", or leave optimizer out and give --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps.',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}}},
            "",
            "ds.json: optimizer.params.adam_w_mode is false: Adam would add the weight decay 0.1 to the gradient, and "
            "gptpar takes it off the weights (AdamW); drop adam_w_mode, or set weight_decay to 0.",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9]}}},
            "",
            "ds.json: optimizer.params.betas is [0.9]: two numbers in brackets are needed.",
        ),
        (
            linear("WarmupLR", warmup_type="log"),
            "",
            'ds.json: scheduler.params.warmup_type is "log": the warm-up is linear here; set it to "linear", or leave '
            "scheduler out and give --lr-warmup-iters and --lr-decay-style.",
        ),
        (
            {**RATE, "scheduler": {"type": "WarmupLR"}},
            "",
            'ds.json: scheduler.params.warmup_type is "log", DeepSpeed\'s default: the warm-up is linear here; set it '
            'to "linear", or leave scheduler out and give --lr-warmup-iters and --lr-decay-style.',
        ),
        (
            {**RATE, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}}},
            "",
            'ds.json: scheduler.type is "OneCycle": only WarmupLR, WarmupDecayLR, WarmupCosineLR have an equal here; '
            "leave scheduler out and give --lr-decay-style, --lr-warmup-iters, --lr-decay-iters and --min-lr.",
        ),
        (
            linear("WarmupDecayLR", total_num_steps=1000),
            "",
            "ds.json: scheduler.params.warmup_max_lr is absent, so DeepSpeed would train at 0.001 and not at "
            "optimizer.params.lr 0.0006: give it.",
        ),
        (
            linear("WarmupCosineLR"),
            "",
            "ds.json: scheduler.params.total_num_steps is missing: the number of steps until the lowest rate.",
        ),
        (
            linear("WarmupLR", total_num_steps=1000),
            "",
            "ds.json: scheduler.params.total_num_steps is unknown; did you mean scheduler.params.warmup_num_steps?",
        ),
        (
            linear("WarmupLR"),
            "--lr-decay-style cosine",
            'ds.json: scheduler.type is "WarmupLR", but --lr-decay-style cosine is given, too: drop one of them, or '
            "make them agree.",
        ),
    ],
)
def test_what_gptpars_optimizer_and_schedule_cannot_be(
    folder: Path, file: dict[str, Any], flags: str, expected: str
) -> None:
    assert problems({**BATCH, **file}, flags) == [expected]


def test_a_schedule_in_steps_needs_a_run_in_steps(folder: Path) -> None:
    Path("ds.json").write_text(json.dumps(linear("WarmupLR")))
    flags = MODEL.replace("--train-iters", "--train-samples")
    parsed = parse_flags(f"{flags} --deepspeed --deepspeed_config ds.json".split())
    assert parsed.problems == [
        "ds.json: scheduler counts steps, and this run is measured in samples: leave scheduler out and give "
        "--lr-decay-style and --lr-warmup-samples, or give --train-iters."
    ]


# --- number formats, ZeRO and offload -------------------------------------------------------------------------------


def test_fp16_scales_as_in_deepspeed(folder: Path) -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    p = resolved({**BATCH, **RATE, "fp16": fp16})[0].precision
    assert p.dtype == "fp16" and p.loss_scale is None and p.initial_loss_scale == 65536
    assert (p.loss_scale_window, p.hysteresis, p.min_loss_scale) == (500, 3, 2)
    p = resolved({**BATCH, **RATE, "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8}})[0].precision
    assert (p.loss_scale, p.initial_loss_scale) == (128, 256)


def test_a_number_format_that_the_file_turns_off_stays_off(folder: Path) -> None:
    assert problems({**BATCH, **RATE, "bf16": {"enabled": False}}, "--bf16") == [
        "ds.json: bf16.enabled is false, but --bf16 is given, too: drop one of them, or make them agree."
    ]


def test_a_loss_scale_without_fp16_changes_nothing(folder: Path) -> None:
    file = {**BATCH, **RATE, "fp16": {"enabled": "auto", "loss_scale": 128}, "bf16": {"enabled": True}}
    assert resolved(file)[0].precision.dtype == "bf16"
    assert parsed_with(file).without_effect == ["fp16.loss_scale: fp16 is not enabled"]
    del file["bf16"]
    assert resolved(file, "--fp16")[0].precision.loss_scale == 128


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


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (
            {"device": "none"},
            "--cpu-optimizer",
            'zero_optimization.offload_optimizer.device is "none", but --cpu-optimizer is given, too: drop one of '
            "them, or make them agree.",
        ),
        (
            {"device": "cpu", "ratio": 0.3},
            "--cpu-optimizer-ratio 0.5",
            "zero_optimization.offload_optimizer.ratio is 0.3, but --cpu-optimizer-ratio 0.5 is given, too: drop one "
            "of them, or make them agree.",
        ),
        (
            {"device": "cpu", "ratios": 0.3},
            "",
            "zero_optimization.offload_optimizer.ratios is unknown; did you mean "
            "zero_optimization.offload_optimizer.ratio?",
        ),
    ],
)
def test_offload_that_cannot_be(folder: Path, file: dict[str, Any], flags: str, expected: str) -> None:
    assert problems(offload(**file), flags) == [f"ds.json: {expected}"]


def test_optimizer_state_on_a_disk(folder: Path) -> None:
    config, _ = resolved(offload(device="nvme", nvme_path=str(folder)))
    assert config.offload.cpu_optimizer and config.offload.optimizer_nvme_path == str(folder)
    assert resolved(offload(device="cpu", nvme_path="/nowhere"))[0].offload.optimizer_nvme_path is None
    found = parsed_with(offload(device="cpu", nvme_path="/nowhere")).without_effect
    assert "zero_optimization.offload_optimizer.nvme_path: it is for NVMe" in found


def test_parameters_on_the_host(folder: Path) -> None:
    file = {**BATCH, **RATE, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert resolved(file)[0].offload.cpu_parameters
    file["zero_optimization"]["offload_param"] = {"device": "nvme"}
    assert problems(file) == [
        'ds.json: zero_optimization.offload_param.device is "nvme": parameters on NVMe are not part of this version '
        'yet; "cpu" and "none" are.'
    ]


# --- the rest -------------------------------------------------------------------------------------------------------


def test_flags_that_agree_or_speak_alone_win(folder: Path) -> None:
    file = {**BATCH, **RATE, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "steps_per_print": None}
    flags = "--zero-stage 3 --bf16 --lr 6e-4 --log-interval 7 --adam-beta2 0.95"
    config, derived = resolved(file, flags)
    assert (config.precision.dtype, config.logging.log_interval, config.optimizer.adam_beta2) == ("bf16", 7, 0.95)
    assert "zero stage" not in derived and "lr" not in derived


def test_what_changes_nothing_is_told_with_its_reason(folder: Path) -> None:
    file = {
        "prescale_gradients": True,
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
        "activation_checkpointing": {"partition_activations": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
        "amp": {"enabled": False},
        "zero_optimization": {"stage3_max_live_parameters": 1e9, "max_live_parameters": "auto"},
    }
    parsed = parsed_with({**BATCH, **RATE, **file})
    assert parsed.problems == [] and parsed.config.parallel.grad_reduce_in_bf16
    assert parsed.without_effect == [
        "prescale_gradients: the loss is divided before the backward pass",
        "wall_clock_breakdown: iteration time and throughput are always measured; see gptpar benchmark --breakdown",
        "tensorboard: see --tensorboard-dir",
        "activation_checkpointing: see --recompute-granularity, --partition-activations and --checkpoint-in-cpu",
        "data_types.grad_accum_dtype: gradients are always summed in fp32",
        "zero_optimization.stage3_max_live_parameters: sizes of messages are chosen here",
    ]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"grandient_accumulation_steps": 4}, "grandient_accumulation_steps is unknown; did you mean gradient_accum"),
        ({"stage": 2}, "stage is unknown; did you mean zero_optimization.stage?"),
        ({"fp16.enabled": True}, "fp16.enabled is unknown;"),
        ({"tensorboard": {"job": 1}}, "tensorboard.job is unknown; the keys there are enabled, output_path, job_name."),
        ({"tensorboard": 1}, "tensorboard is 1: an object in braces is needed."),
        ({"zero_optimization": True}, "zero_optimization is true: an object in braces is needed."),
        ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage is "2": a whole number is needed.'),
        ({"gradient_clipping": True}, "gradient_clipping is true: a number is needed."),
        ({"gradient_clipping": 10**400}, "gradient_clipping is 1000000"),
        ({"steps_per_print": 10**400}, "steps_per_print is 1000000"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled is "yes": true or false is needed.'),
        ({"amp": {"enabled": True}}, "amp: Apex is not part of gptpar; leave it out."),
        ({"scheduler": {"type": []}}, "scheduler.type is []: only WarmupLR,"),
        ({"communication_data_type": "fp8"}, 'communication_data_type is "fp8": one of fp32, bf16 is needed.'),
        ({"fp16": {"enabled": True, "initial_scale_power": 999}}, "fp16.initial_scale_power is 999: a whole number fr"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is true: master wei"),
    ],
)
def test_a_key_or_value_that_is_not_understood(folder: Path, file: dict[str, Any], expected: str) -> None:
    found = problems({**BATCH, **RATE, **file})
    assert len(found) == 1 and found[0].startswith(f"ds.json: {expected}"), found


def test_two_keys_of_one_meaning_must_agree(folder: Path) -> None:
    file = {**BATCH, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 1, "max_grad_norm": 2}}}
    assert problems(file) == ["ds.json: gradient_clipping is 1.0, but optimizer.params.max_grad_norm is 2: keep one."]


def test_problems_of_file_and_flags_are_told_together(folder: Path) -> None:
    found = problems({**BATCH, **RATE, "zero_optimization": {"stage": 7}, "x": 1}, "--hidden-size 770 --num-layer 2")
    assert found == [
        "unknown flag --num-layer; did you mean --num-layers?",
        "ds.json: x is unknown; leave it out.",
        "--hidden-size 770 is not divisible by --num-attention-heads 12: use 768 or 780, or give --kv-channels.",
        "--zero-stage is 7; it must be at most 3.",
    ]
