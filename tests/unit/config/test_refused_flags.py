"""Flags whose values cannot be, or would be ignored: what is told, and what is not told besides."""

from __future__ import annotations

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY

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


@pytest.mark.parametrize(("flag", "text"), [("--save", ""), ("--data-path", "  "), ("--seed", "")])
def test_an_empty_text_is_an_unset_variable(flag: str, text: str) -> None:
    (problem,) = problems([flag, text])
    assert problem.startswith(f"{flag}") and "perhaps by an unset shell variable: set it, or leave the flag" in problem


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--micro-batch-size x", "--micro-batch-size x: a whole number is needed."),
        ("--train-iters 1e99", "--train-iters is 1e+99; it must be at most 10,000,000,000."),
        ("--vocab-size -1", "--vocab-size is -1; it must be at least 1."),
    ],
)
def test_a_refused_flag_is_not_called_missing_besides(flags: str, told: str) -> None:
    name = flags.split()[0]
    start = " ".join(f"--{words}" for words in TINY.removeprefix("--").split(" --") if f"--{words.split()[0]}" != name)
    assert problems(flags, start) == [told]


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hidden-size 1e18", "--hidden-size is 1e+18; it must be at most 1,000,000."),
        ("--vocab-size 1e18", "--vocab-size is 1e+18; it must be at most 2,147,483,647, as token ids have 32 bits."),
        ("--lr 1e300", "--lr is 1e+300; it must be at most 3.4e+38."),
        (
            "--num-layers 10000 --hidden-size 1000000",
            "the model would have 1.2e+17 parameters (--num-layers 10000, --hid",
        ),
        (
            "--micro-batch-size 1000000 --seq-length 100000000",
            "one activation would have 1.28e+16 elements (--micro-ba",
        ),
        (
            "--train-iters 1e10 --global-batch-size 100000000",
            "the run would read 1e+18 samples x 16 tokens, more than t",
        ),
        ("--eval-iters 1e17 --eval-interval 1", "21 evaluations of --eval-iters 100000000000000000 would"),
    ],
)
def test_sizes_that_nobody_can_mean_are_told(flags: str, told: str) -> None:
    found = problems(flags)
    assert any(told in problem for problem in found), found


def test_a_derived_size_is_held_to_its_flags_limits() -> None:
    assert problems("--swiglu --hidden-size 16") == [
        "--ffn-hidden-size follows from 8/3 x hidden for a gated MLP, a multiple of 64 and is 0; it must be at least 1"
        ": give it, or other numbers."
    ]
    assert problems("--swiglu --hidden-size 24") == []
    assert problems("--hidden-size 2") == [
        "--kv-channels follows from hidden / heads and is 0; it must be at least 1: give it, or other numbers."
    ]
    assert len(problems("--swiglu --hidden-size 16 --lr-warmup-iters 99 --zero-stage 9")) == 3


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
        (EXPERTS + "--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8: lower it."),
        (EXPERTS + "--moe-router-topk 1", "--moe-router-topk 1 with a softmax over the chosen expert alone weighs it"),
        (EXPERTS + "--moe-layer-freq [0]*1+[1]*9", "--moe-layer-freq lists 10 blocks, and --num-layers is 2: list as"),
        (EXPERTS + "--moe-layer-freq [0,0]", "--moe-layer-freq [0,0] gives no block experts: list a 1, or drop"),
        (
            SIGMOID + "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--moe-router-num-groups 3, --moe-router-group",
        ),
        (
            EXPERTS + GROUPS,
            "--moe-router-num-groups 4, --moe-router-group-topk 2: groups are compared by scores over all",
        ),
        (EXPERTS + "--moe-expert-capacity-factor 4", "--moe-expert-capacity-factor 4 limits nothing: from --num-exper"),
        (EXPERTS + "--moe-shared-expert-gate", "--moe-shared-expert-gate is a shared expert's: give --moe-shared-ex"),
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


# --- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        # 20 steps of 2 samples of 16 tokens: 640 tokens
        (
            "--lr-warmup-tokens 640",
            "--lr-warmup-tokens 640 must be less than the decay's 640, or --lr is never reached.",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 17 --lr-warmup-iters 4",
            "--lr-wsd-decay-iters 17 must be at most what the warm-up leaves of the decay, 20 - 4, or the rate falls "
            "as soon as the warm-up is over.",
        ),
        (
            "--train-tokens 64 --lr-warmup-iters 2",
            "--lr-warmup-iters 2 must be less than the decay's 2, or --lr is nev",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_told(flags: str, told: str) -> None:
    (problem,) = problems(flags)
    assert problem.startswith(told)
