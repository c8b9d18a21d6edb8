"""Flags whose values cannot be, or would be ignored: what is told, and what is not told besides; Muon's flags."""

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY, tiny_config

MODEL = TINY.replace("--train-iters 20 ", "")


def problems(words: str | list[str], start: str = TINY) -> list[str]:
    try:
        resolve(parse_flags([*start.split(), *(words.split() if isinstance(words, str) else words)]), 1)
    except ConfigError as error:
        return error.problems
    return []


# --- values that cannot be read -------------------------------------------------------------------------------------


def test_all_problems_of_a_line_are_told_beside_a_word_among_numbers() -> None:
    flags = "--train-samples 9 --rampup-batch-size 16 x 1000 --num-layer 3 --hidden-size 34"
    assert problems(flags, MODEL) == [
        "--rampup-batch-size x: a whole number is needed.",
        "unknown flag --num-layer; did you mean --num-layers?",
        "--hidden-size 34 is not divisible by --num-attention-heads 4: use 32 or 36, or give --kv-channels.",
    ]


@pytest.mark.parametrize(
    ("betas", "told"),
    [
        ((0.9, 0.999), ""),
        ((0.0, 0.0), ""),
        ((0.5, 0.999), "18.3 of"),
        ((0.9, 0.9999), "22.9 of"),
        ((0.9, 0.5), "inf of"),
    ],
)
def test_first_moments_that_8_bits_may_not_reach_are_told(betas: tuple[float, float], told: str) -> None:
    found = problems(f"--exp-avg-dtype fp8 --adam-beta1 {betas[0]} --adam-beta2 {betas[1]}")
    assert len(found) == bool(told) and all(f"it may be {told} them: take bf16 or fp32." in one for one in found)


@pytest.mark.parametrize(("flag", "text"), [("--save", ""), ("--data-path", "  "), ("--seed", "")])
def test_an_empty_text_is_an_unset_variable(flag: str, text: str) -> None:
    (problem,) = problems([flag, text])
    assert problem.startswith(f"{flag}") and "perhaps by an unset shell variable: set it, or leave the flag" in problem


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hidden-size 1e18", "--hidden-size is 1e+18; it must be at most 1,000,000."),
        ("--lr-warmup-init=-1e39", "--lr-warmup-init is -1e+39; its size must be at most"),
        ("--vocab-size 1e18", "--vocab-size is 1e+18; it must be at most 2,147,483,647, as token ids have 32 bits."),
        (
            "--num-layers 10000 --hidden-size 1000000",
            "the model would have 1.2e+17 parameters (--num-layers 10000, --hid",
        ),
        (
            "--micro-batch-size 1000000 --seq-length 100000000",
            "one activation would have 1.28e+16 elements (--micro-ba",
        ),
        ("--eval-iters 1e17 --eval-interval 1", "21 evaluations of --eval-iters 100000000000000000 would"),
    ],
)
def test_sizes_that_nobody_can_mean_are_told(flags: str, told: str) -> None:
    found = problems(flags)
    assert any(told in problem for problem in found), found


# --- mixture-of-experts ---------------------------------------------------------------------------------------------


EXPERTS = "--num-experts 8 --disable-bias-linear "
SIGMOID, GROUPS = (
    EXPERTS + "--moe-router-score-function sigmoid ",
    "--moe-router-num-groups 4 --moe-router-group-topk 2 ",
)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (EXPERTS + "--moe-expert-parallel-size 2", "--expert-model-parallel-size 2 does not divide the 1 process"),
        ("--moe-router-topk 3", "--moe-router-topk: these are for experts, and --num-experts is 1: raise it, or leave"),
        (EXPERTS + "--moe-router-topk 1", "--moe-router-topk 1 with a softmax over the chosen expert alone weighs it"),
        (EXPERTS + "--moe-layer-freq [0]*1+[1]*9", "--moe-layer-freq lists 10 blocks, and --num-layers is 2: list as"),
        (
            SIGMOID + "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--moe-router-num-groups 3, --moe-router-group",
        ),
        (EXPERTS + "--moe-expert-capacity-factor 4", "--moe-expert-capacity-factor 4 limits nothing: from --num-exper"),
        (
            EXPERTS + "--mup --mup-base-hidden-size 2 --optimizer muon",
            "--mup has a rule for Muon's update of a router with at most",
        ),
        (EXPERTS + "--cuda-graph on --attention-dropout 0 --hidden-dropout 0", "--cuda-graph on: experts of width"),
    ],
)
def test_experts_that_cannot_be_are_told(flags: str, told: str) -> None:
    (problem,) = problems(flags)
    assert problem.startswith(told)


# --- Muon's flags: ours, Megatron's, and what is wrong with some ----------------------------------------------------


MUON = "--optimizer muon"


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("", "muon_nesterov", True),
        ("--muon-no-nesterov", "muon_nesterov", False),
        ("--muon-nesterov", "muon_nesterov", True),
        ("--muon-no-split-qkv", "muon_qkv", "fused"),
        ("--muon-split-qkv-per-head", "muon_qkv", "heads"),
        ("--muon-tp-mode duplicated --muon-fp32-matmul-prec medium --muon-scalar-optimizer adam", "optimizer", "muon"),
        ("--use-layer-wise-distributed-optimizer", "optimizer", "muon"),
    ],
)
def test_megatrons_flags_mean_the_same(flags: str, field: str, value: object) -> None:
    assert getattr(tiny_config(f"{MUON} {flags}").optimizer, field) == value


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--muon-tp-mode blockwise", "a matrix is orthogonalized whole"),
        ("--muon-scalar-optimizer lion", "AdamW updates what Muon does not"),
        ("--muon-num-ns-steps 6", "takes 5, 10, ... iterations"),
        ("--muon-no-nesterov --muon-nesterov", "keep one"),
        ("--lr 0 --muon-lr 0.02", "give a rate above 0"),
        ("--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16 is built for --optimizer adam alone"),
    ],
)
def test_a_wrong_flag_is_told(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(f"{MUON} {flags}")
    assert problem in str(caught.value)
