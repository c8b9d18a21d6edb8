"""What launch scripts of Megatron-LM, its older versions and its forks say: defaults, names, and files of words."""

import dataclasses
import json
from pathlib import Path

import pytest

from gptpar.config import DataConfig
from gptpar.config.flags import parse_flags
from gptpar.config.layer_patterns import layer_pattern
from gptpar.config.validate import resolve
from tests.helpers import TINY
from tests.unit.config.flag_problems import resolved


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


def test_the_gated_unit_of_bigscience_has_the_plain_width() -> None:
    for flags, *expected in (
        ("--glu-activation swiglu", "gelu_tanh", True, 128),
        ("--glu-activation swiglu --ffn-hidden-size 96", "gelu_tanh", True, 96),
        ("--glu-activation geglu", "geglu", False, 128),
        ("--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1", "quick_geglu", False, 128),
    ):
        model = resolved(flags).model
        assert [model.mlp_activation, model.swiglu, model.ffn_hidden_size] == expected


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("--model-parallel-size 1 --batch-size 4", "--micro-batch-size 4"),
        ("--warmup 0.1 --optimizer adamw", "--lr-warmup-fraction 0.1"),
        ("--wandb_project p --use_wandb", "--wandb-project p"),
        ("--wandb-project-name p --wandb-entity-name e", "--wandb-project p --wandb-entity e"),
        ("--clip_grad=0.5 --no_bias_dropout_fusion", "--clip-grad 0.5"),
        ("--save r --save-total-limit 2", "--save r --keep-checkpoints 2"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.3", "--cpu-optimizer --cpu-optimizer-ratio 0.3"),
        ("--check-weight-hash-across-dp-replicas-interval 5", "--check-replicas-interval 5"),
        ("--z-loss-strength 1e-3", "--z-loss-weight 1e-3"),
        ("--gas 2 --pipe-parallel-size 1", "--gradient-accumulation-steps 2"),
        ("--save run --persistent-save-interval 7", "--save run --save-interval 7"),
        ("--save-xser run", "--save run"),
        ("--kill-switch-file stop", "--kill-switch-path stop"),
        ("--num_experts 1", ""),
        ("--create-moe-param-group --disable-moe-token-dropping --moe-eval-capacity-factor 1.0 --data-impl mmap", ""),
        ("--muon-no-split-qkv", "--muon-qkv fused"),
        ("--muon-split-qkv-per-head", "--muon-qkv heads"),
        ("--muon-tp-mode duplicated --muon-fp32-matmul-prec medium --muon-scalar-optimizer adam", ""),
        ("--use-layer-wise-distributed-optimizer", ""),
        ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
        ("--use-packed-seq-params", "--reset-attention-mask"),
        ("--dataloader-inter-document-masking", "--reset-attention-mask"),
        ("--tokenizer-path a.model", "--tokenizer-model a.model"),
        ("--tokenizer-file a.model", "--tokenizer-model a.model"),
        ("--tokenizer-name-or-path a.model", "--tokenizer-model a.model"),
    ],
)
def test_older_and_other_names_mean_the_same(said: str, same: str) -> None:
    found = parse_flags(said.split())
    assert found.flags == parse_flags(same.split()).flags and not found.problems


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("--position-embedding-type rope --no-rope-freq 4", "--position-embedding-type rope --rope-pattern RRRN"),
        ("--position-embedding-type rope --no-rope-freq [1,0]", "--position-embedding-type rope --rope-pattern NR"),
        ("--window-size 4 --window-attn-skip-freq 3", "--window-size 4 --window-pattern SSF"),
        ("--window-size 4 --window-attn-skip-freq [1]*2+[0]", "--window-size 4 --window-pattern SSF"),
    ],
)
def test_patterns_of_layers_may_be_megatrons_frequencies(said: str, same: str) -> None:
    assert resolved(said) == resolved(same)


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
    unreadable, no_words = parse_flags(wrong.split()).problems
    assert unreadable == f"--data-args-path {tmp_path}/none: it cannot be read (No such file or directory)."
    assert no_words.endswith(f"{tmp_path}/other.json: train must be a list of words, or a text of them.")
    (tmp_path / "cut.json").write_text('{"train": ')
    (no_json,) = parse_flags(["--per-split-data-args-path", f"{tmp_path}/cut.json"]).problems
    assert "it is no JSON (line 1, column 11: " in no_json
    (twice,) = parse_flags(f"--data-args-path {tmp_path}/blend --data-path {a}".split()).problems
    assert twice.endswith("blend holds the words of --data-path, which is given, too: keep one.")


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


def test_a_pattern_of_layers_is_a_number_or_a_sum_of_lists() -> None:
    assert layer_pattern("           3 ", "RN", 0) == "RRN" and layer_pattern(f"{'0' * 5000}2", "RN", 0) == "RN"
    assert layer_pattern("([0]*3+[1]*1)*2", "RN", 0) == "RRRNRRRN" and layer_pattern("1", "RN", 0) == "N"
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
