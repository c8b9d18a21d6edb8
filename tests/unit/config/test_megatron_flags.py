"""What launch scripts of Megatron-LM, its older versions and its forks say: defaults, names, and files of words."""

import dataclasses
import json
from pathlib import Path

import pytest

from gptpar.config import Config, DataConfig
from gptpar.config.flags import parse_flags
from gptpar.config.layer_patterns import layer_pattern
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY


def resolved(flags: str) -> Config:
    return resolve(parse_flags([*TINY.split(), *flags.split()]), 1)[0]


def problems(flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolved(flags)
    return caught.value.problems


def test_strategies_of_sharding_are_zero_stages() -> None:
    for flags, stage in (
        ("--use-torch-fsdp2", 3),
        ("--use-megatron-fsdp --use-distributed-optimizer", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-megatron-fsdp --zero-stage 1", 1),
    ):
        assert resolved(flags).parallel.zero_stage == stage, flags
    assert problems("--data-parallel-sharding-strategy optim") == [
        "--data-parallel-sharding-strategy is for --use-megatron-fsdp: give that flag, too, or --zero-stage N."
    ]


def test_the_gated_unit_of_bigscience_has_the_plain_width() -> None:
    model = resolved("--glu-activation swiglu").model
    assert model.swiglu and model.ffn_hidden_size == 4 * model.hidden_size
    assert resolved("--glu-activation swiglu --ffn-hidden-size 96").model.ffn_hidden_size == 96
    gelu = resolved("--glu-activation geglu").model
    assert (gelu.mlp_activation, gelu.ffn_hidden_size, gelu.swiglu) == ("geglu", 4 * gelu.hidden_size, False)
    quick = resolved("--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1").model
    assert (quick.mlp_activation, quick.ffn_hidden_size) == ("quick_geglu", 4 * quick.hidden_size)
    assert problems("--glu-activation x") == [
        "--glu-activation x: unknown; it takes one of swiglu, geglu, geglu_tanh, quick_geglu, reglu, liglu."
    ]


def test_older_and_other_names_mean_the_same() -> None:
    older = resolved("--model-parallel-size 1 --batch-size 4 --warmup 0.1 --optimizer adamw")
    assert older == resolved("--micro-batch-size 4 --lr-warmup-fraction 0.1")
    assert parse_flags(["--distribute-checkpointed-activations"]).flags.recompute.distribute_saved_activations
    assert resolved("--wandb_project p --use_wandb").logging.wandb_project == "p"
    assert resolved("--clip_grad=0.5 --no_bias_dropout_fusion") == resolved("--clip-grad 0.5")
    assert problems("--clip_grade 1") == ["unknown flag --clip_grade; did you mean --clip-grad?"]
    assert parse_flags(["--save-total-limit", "2"]).flags == parse_flags(["--keep-checkpoints", "2"]).flags
    for name in ("--use-packed-seq-params", "--dataloader-inter-document-masking"):
        assert parse_flags([name]).flags == parse_flags(["--reset-attention-mask"]).flags
    logged = resolved("--wandb-project-name p --wandb-entity-name e").logging
    assert (logged.wandb_project, logged.wandb_entity) == ("p", "e")
    assert resolved("--optimizer-cpu-offload --optimizer-offload-fraction 0.3").offload.ratio == 0.3
    assert resolved("--check-weight-hash-across-dp-replicas-interval 5").health.check_replicas_interval == 5


def test_the_words_of_the_data_may_be_in_files(tmp_path: Path) -> None:
    for prefix in "abc":
        for end in (".bin", ".idx"):
            (tmp_path / f"{prefix}{end}").touch()
    a, b, c = (f"{tmp_path}/{prefix}" for prefix in "abc")
    (tmp_path / "blend").write_text(f"0.3 {a}\n0.7 {b}\n")
    (tmp_path / "split.json").write_text(json.dumps({"train": f"1 {a} 2 {b}", "valid": [3, c], "test": None}))
    words = [word for word in TINY.split() if word != "--mock-data"]

    def data_of(flags: str) -> DataConfig:
        return resolve(parse_flags([*words, *flags.split()]), 1)[0].data

    assert data_of(f"--data-args-path {tmp_path}/blend") == data_of(f"--data-path 0.3 {a} 0.7 {b}")
    (told,) = parse_flags(["--data-args-path", f"{tmp_path}/blend"]).derived
    assert (told.name, told.value, told.reason) == ("data path", f"0.3 {a} 0.7 {b}", "its file")
    by_split = data_of(f"--train-data-path 1 {a} 2 {b} --valid-data-path 3 {c}")
    assert data_of(f"--per-split-data-args-path {tmp_path}/split.json") == by_split
    (tmp_path / "other.json").write_text('{"train": 3}')
    wrong = f"--data-args-path {tmp_path}/none --per-split-data-args-path {tmp_path}/other.json"
    assert parse_flags(wrong.split()).problems == [
        f"--data-args-path {tmp_path}/none: it cannot be read (No such file or directory).",
        f"--per-split-data-args-path {tmp_path}/other.json: train must be a list of words, or a text of them.",
    ]
    assert parse_flags(f"--data-args-path {tmp_path}/blend --data-path {a}".split()).problems == [
        f"--data-args-path {tmp_path}/blend holds the words of --data-path, which is given, too: keep one."
    ]


GPT_LITE = """{
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true, "num_checkpoints": 4},
  "zero_optimization": {"stage": 3, "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
    "all_reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}}
}"""
"""A file of the kind that accompanies a small GPT under ZeRO-3 with offload."""
TWIN_FLOW = """{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1,
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 0.3}},
  "gradient_clipping": 1.0, "prescale_gradients": false,
  "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
    "initial_scale_power": 11},
  "bf16": {"enabled": true}, "wall_clock_breakdown": false}"""
COMMON = "--mock-data --vocab-size 50257 --eval-iters 0"


@pytest.mark.parametrize(
    ("file", "flags", "world", "expected"),
    [
        (GPT_LITE, f"--preset 124M --train-iters 30 {COMMON}", 2, (4, 3, 1.0, True, "fp16")),
        (
            TWIN_FLOW,
            "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1 "
            "--moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 "
            "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --init-method-std 0.014 --lr-decay-tokens "
            "260000000000 --lr-warmup-tokens 375000000 --micro-batch-size 2 --exit-duration-in-mins 30000000 "
            "--rampup-batch-size 32 32 1953125 --global-batch-size 256 --num-layers 24 --hidden-size 1024 "
            "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --train-tokens "
            "300000000000 --train-samples 439453125 --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine "
            "--log-interval 1 --eval-interval 100 --save-interval 1000 --weight-decay 0.1 --clip-grad 1.0 "
            "--hysteresis 2 --num-workers 0 --fp16 --tensorboard-queue-size 1 --log-timers-to-tensorboard "
            "--timing-log-level 1 --no-pipeline-parallel --cpu-optimizer --log-batch-size-to-tensorboard "
            "--log-validation-ppl-to-tensorboard --checkpoint-activations --data-impl mmap "
            "--create-moe-param-group --disable-moe-token-dropping --pipeline-model-parallel-size 1 "
            f"--deepspeed-activation-checkpointing {COMMON}",
            16,
            (2, 3, 0.3, False, "bf16"),
        ),
    ],
    ids=["gpt-lite", "twin-flow"],
)
def test_the_shapes_of_well_known_examples_start(
    tmp_path: Path, file: str, flags: str, world: int, expected: tuple[object, ...]
) -> None:
    (tmp_path / "ds.json").write_text(file)
    parsed = parse_flags([*flags.split(), "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    config, _ = resolve(parsed, world)
    offload = config.offload
    assert (
        config.batch.micro_batch_size,
        config.parallel.zero_stage,
        offload.ratio,
        offload.cpu_parameters,
        config.precision.dtype,
    ) == expected


# --- Flags of forks and older versions of Megatron-LM that say the same as flags here -------------------------------


@pytest.mark.parametrize(
    ("said", "meant", "row"),
    [
        ("--use-z-loss", "--z-loss-weight 1e-4", ("z loss weight", 1e-4)),
        ("--no-train 1", "--skip-train", ("skip train", True)),
        ("--erf-gelu", "--mlp-activation gelu", ("mlp activation", "gelu")),
    ],
)
def test_a_flag_that_stands_for_another_is_told_and_may_not_contradict_it(
    said: str, meant: str, row: tuple[str, object], tmp_path: Path
) -> None:
    start = f"--load {tmp_path}"
    config, derived = resolve(parse_flags([*TINY.split(), *start.split(), *said.split()]), 1)
    assert config == resolved(f"{start} {meant}") == resolved(f"{start} {said} {meant}") != resolved(start)
    assert (*row, said) in [(one.name, one.value, one.reason) for one in derived]


def test_a_flag_that_stands_for_another_value_is_refused() -> None:
    assert problems("--use-z-loss --z-loss-weight 1e-5") == [
        "--use-z-loss means --z-loss-weight 0.0001, and --z-loss-weight 1e-05 is given, too: keep one."
    ]
    assert problems("--num-query-groups 2 --attention-head-type multiquery") == [
        "--attention-head-type multiquery means --num-query-groups 1, and --num-query-groups 2 is given, too: keep one."
    ]
    assert problems("--attention-head-type multi --fim-rate 0.5") == [
        "--attention-head-type multi: without --num-query-groups each query head has its own key and value; leave it "
        "out, or give multihead or multiquery.",
        "--fim-rate 0.5: fill-in-the-middle training is not part of gptpar; leave it out, or give 0.",
    ]


def test_second_names_of_flags() -> None:
    assert resolved("--z-loss-strength 1e-3") == resolved("--z-loss-weight 1e-3")
    for name in ("--tokenizer-path", "--tokenizer-file", "--tokenizer-name-or-path"):
        assert parse_flags([name, "a.model"]).flags.tokenizer.tokenizer_model == "a.model"
    assert resolved("--gas 2 --pipe-parallel-size 1") == resolved("--gradient-accumulation-steps 2")
    assert resolved("--save run --persistent-save-interval 7") == resolved("--save run --save-interval 7")
    assert resolved("--kill-switch-file stop") == resolved("--kill-switch-path stop")
    assert parse_flags(["--save-xser", "run"]).flags.checkpoint.save == "run"
    assert parse_flags(["--num_experts", "1"]).problems == []


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("--no-rope-freq 4", "--rope-pattern RRRN"),
        ("--no-rope-freq ([0]*3+[1]*1)*2", "--rope-pattern RRRNRRRN"),
        ("--no-rope-freq [1,0]", "--rope-pattern NR"),
        ("--no-rope-freq 1", "--rope-pattern N"),
        ("--no-rope-freq 00000000004", "--rope-pattern RRRN"),
        ("--window-size 4 --window-attn-skip-freq 3", "--window-size 4 --window-pattern SSF"),
        ("--window-size 4 --window-attn-skip-freq [1]*2+[0]", "--window-size 4 --window-pattern SSF"),
    ],
)
def test_layers_without_positions_or_windows_by_the_names_of_megatron(flags: str, same: str) -> None:
    assert resolved(f"--position-embedding-type rope {flags}") == resolved(f"--position-embedding-type rope {same}")


def test_spaces_around_a_number_of_layers_and_lists_in_lists() -> None:
    assert layer_pattern("           3 ", "RN", 0) == "RRN" and layer_pattern(f"{'0' * 5000}2", "RN", 0) == "RN"
    for text in ("[[0]]", "[[0], 1]", "[]", "0", "20000000001"):
        with pytest.raises(ValueError, match=r"a number from 1 to 10,000, or a list of 0 and 1"):
            layer_pattern(text, "RN", 0)


def test_a_repeated_list_of_blocks_with_experts() -> None:
    model = resolved("--num-layers 4 --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax").model
    for text in ("([0]*1+[1]*1)*2", "2*([0] + [1])"):
        assert dataclasses.replace(model, moe_layer_freq=text).blocks_with_experts(4) == [False, True] * 2


@pytest.mark.parametrize("name", ["save-optim", "load-rng", "check-for-nan-in-loss-and-grad", "rope-fusion"])
def test_a_switch_is_turned_off_by_either_of_megatrons_words(name: str) -> None:
    off, disabled = (parse_flags([f"--{word}-{name}"]) for word in ("no", "disable"))
    assert (disabled.flags, disabled.problems, disabled.without_effect) == (off.flags, [], off.without_effect)
    assert off.flags != parse_flags([]).flags or off.without_effect
