"""Flags whose values cannot be, or would be ignored: what is told, and what is not told besides."""

from __future__ import annotations

import pytest

from gptpar.config.flags import ParsedFlags, parse_flags
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


@pytest.mark.parametrize("flag", ["--save", "--load", "--tensorboard-dir", "--data-path", "--wandb-project", "--seed"])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_an_unset_variable(flag: str, text: str) -> None:
    (problem,) = problems([flag, text])
    assert problem.startswith(f"{flag}") and "perhaps by an unset shell variable: set it, or leave the flag" in problem


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--micro-batch-size x", "--micro-batch-size x: a whole number is needed."),
        ("--num-layers 0", "--num-layers is 0; it must be at least 1."),
        ("--lr y", "--lr y: a number is needed."),
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
        ("--seq-length 1e11", "--seq-length is 1e+11; it must be at most 100,000,000."),
        ("--num-attention-heads 1e18", "--num-attention-heads is 1e+18; it must be at most 100,000."),
        ("--vocab-size 1e18", "--vocab-size is 1e+18; it must be at most 2,147,483,647, as token ids have 32 bits."),
        ("--lr 1e300", "--lr is 1e+300; it must be at most 3.4e+38."),
        ("--distributed-timeout-minutes 1e30", "--distributed-timeout-minutes is 1e+30; it must be at most 1,000,000."),
        ("--log-interval 9223372036854775808", "it must be at most 9,223,372,036,854,775,807."),
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


def test_a_norm_of_one_channel_is_told() -> None:
    assert problems("--qk-layernorm --kv-channels 2") == []
    assert problems("--qk-layernorm --kv-channels 1") == [
        "--qk-layernorm normalises over the channels of a head, and --kv-channels is 1: use at least 2."
    ]


# --- mixture-of-experts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-topk-limited-devices=4",
        "--moe-latent-size 64",
        "--expert-interval-x 2",
    ],
)
def test_options_of_experts_that_are_not_there_are_refused(flags: str) -> None:
    (problem,) = problems(flags)
    assert problem.startswith(f"{flags.replace('=', ' ')}: this option of experts is not part of gptpar yet, and a mo")


EXPERTS = "--num-experts 8 --disable-bias-linear "
SIGMOID, GROUPS = (
    EXPERTS + "--moe-router-score-function sigmoid ",
    "--moe-router-num-groups 4 --moe-router-group-topk 2 ",
)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-experts 8 8 --disable-bias-linear", "unexpected word '8'; values follow a flag."),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2: tensor-parallel processes split the"),
        (EXPERTS + "--moe-expert-parallel-size 2", "--expert-model-parallel-size 2 does not divide the 1 process"),
        ("--mlp-type residual", "--mlp-type residual: DeepSpeed's mixture-of-experts is not part of gptpar; leave it"),
        ("--moe-router-topk 3", "--moe-router-topk: these are for experts, and --num-experts is 1: raise it, or leave"),
        (EXPERTS + "--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8: lower it."),
        (EXPERTS + "--moe-router-topk 1", "--moe-router-topk 1 with a softmax over the chosen expert alone weighs it"),
        (EXPERTS + "--moe-layer-freq [0]*1+[1]*9", "--moe-layer-freq lists 10 blocks, and --num-layers is 2: list as"),
        (EXPERTS + "--moe-layer-freq [0,0]", "--moe-layer-freq [0,0] gives no block experts: list a 1, or drop"),
        (EXPERTS + "--moe-layer-freq [2]*2", "--moe-layer-freq [2]*2: '[2]*2' is neither a number nor a list of 0"),
        (EXPERTS + "--moe-layer-freq x", "--moe-layer-freq x: 'x' is neither a number nor a list of 0 and 1"),
        (EXPERTS + "--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1 is a factor of no loss: give --moe-router"),
        (
            EXPERTS + "--moe-router-load-balancing-type seq_aux_loss",
            "--moe-router-load-balancing-type seq_aux_loss with",
        ),
        (
            SIGMOID + "--moe-router-num-groups 4",
            "--moe-router-num-groups 4, --moe-router-group-topk None: how many gro",
        ),
        (
            SIGMOID + "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--moe-router-num-groups 3, --moe-router-group",
        ),
        (
            SIGMOID + GROUPS + "--moe-router-topk 3",
            "--moe-router-num-groups 4, --moe-router-group-topk 2: the 3 experts",
        ),
        (
            SIGMOID + GROUPS + "--moe-router-topk 6",
            "--moe-router-num-groups 4, --moe-router-group-topk 2: the 6 experts",
        ),
        (
            EXPERTS + GROUPS,
            "--moe-router-num-groups 4, --moe-router-group-topk 2: groups are compared by scores over all",
        ),
        (
            EXPERTS + "--moe-token-drop-policy position",
            "--moe-token-drop-policy is for full experts: give --moe-expert-",
        ),
        (EXPERTS + "--moe-expert-capacity-factor 4", "--moe-expert-capacity-factor 4 limits nothing: from --num-exper"),
        (EXPERTS + "--moe-router-score-function sigmoid --moe-router-pre-softmax", "--moe-router-pre-softmax is for"),
        (EXPERTS + "--moe-shared-expert-gate", "--moe-shared-expert-gate is a shared expert's: give --moe-shared-ex"),
        (
            EXPERTS + "--mup --mup-base-hidden-size 8 --optimizer muon",
            "--mup has no rule for Muon's update of a router",
        ),
        (EXPERTS + "--moe-loss-coeff 0.1", "--moe-loss-coeff: DeepSpeed's mixture-of-experts is not part of gptpar,"),
        (EXPERTS + "--cuda-graph on --attention-dropout 0 --hidden-dropout 0", "--cuda-graph on: experts of width"),
    ],
)
def test_experts_that_cannot_be_are_told(flags: str, told: str) -> None:
    (problem,) = problems(flags)
    assert problem.startswith(told)


def test_the_width_of_experts_is_split_over_tensor_ranks() -> None:
    parsed = parse_flags(
        [*TINY.split(), *EXPERTS.split(), "--moe-ffn-hidden-size", "9", "--tensor-model-parallel-size", "2"]
    )
    with pytest.raises(Exception, match="--moe-ffn-hidden-size 9 is not divisible by --tensor-model-parallel-size 2"):
        resolve(parsed, 2)


def test_flags_of_a_dense_model_have_no_effect() -> None:
    flags = (
        "--num-experts 1 --moe-expert-parallel-size 1 --mlp-type standard --moe-loss-coeff 0.0 --moe-min-capacity 4 "
        "--moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --expert-interval 2"
    )
    parsed: ParsedFlags = parse_flags([*TINY.split(), *flags.split(), "--create-moe-param-group"])
    assert resolve(parsed, 1)[0] == resolve(parse_flags(TINY.split()), 1)[0]
    assert len(parsed.without_effect) == 7
    assert "--moe-loss-coeff: DeepSpeed's mixture-of-experts is not part of gptpar" in parsed.without_effect


# --- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        # 20 steps of 2 samples of 16 tokens: 640 tokens
        (
            "--lr-warmup-tokens 640",
            "--lr-warmup-tokens 640 must be less than the decay's 640, or --lr is never reached.",
        ),
        ("--lr-warmup-tokens 1e9", "--lr-warmup-tokens 1000000000 must be less than the decay's 640, or --lr is never"),
        (
            "--lr-warmup-iters 10 --lr-decay-tokens 320",
            "--lr-warmup-iters 10 must be less than the decay's 10, or --lr",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 17 --lr-warmup-iters 4",
            "--lr-wsd-decay-iters 17 must be at most what the warm-up leaves of the decay, 20 - 4, or the rate falls "
            "as soon as the warm-up is over.",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 21",
            "--lr-wsd-decay-iters 21 must be at most what the warm-up leav",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 11 --lr-decay-iters 10",
            "--lr-wsd-decay-iters 11 must be at most what the warm-up leaves of the decay, 10 - 0, or the rate falls",
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


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-warmup-tokens 639",
        "--lr-warmup-tokens 5000 --lr-decay-tokens 9000",  # the first part of a longer run
        "--lr-decay-style WSD --lr-wsd-decay-iters 16 --lr-warmup-iters 4",
        "--lr-decay-style WSD --lr-wsd-decay-iters 20",
        "--lr-wsd-decay-iters 99",  # of another style
        "--lr-warmup-iters 40 --lr-decay-iters 90",
    ],
)
def test_a_schedule_that_fits_is_not(flags: str) -> None:
    assert problems(flags) == []


def test_schedules_of_a_run_in_samples_are_told_in_samples() -> None:
    start = f"{MODEL} --train-samples 40"
    flags = "--lr-decay-style WSD --lr-wsd-decay-samples 39 --lr-warmup-samples 2"
    assert problems(flags, start) == [
        "--lr-wsd-decay-samples 39 must be at most what the warm-up leaves of the decay, 40 - 2, or the rate falls as "
        "soon as the warm-up is over."
    ]
    assert problems("--lr-warmup-samples 40", start) == [
        "--lr-warmup-samples 40 must be less than the decay's 40, or --lr is never reached."
    ]


def test_a_growing_weight_decay_needs_its_style_as_in_megatron() -> None:
    (problem,) = problems("--start-weight-decay 0.1 --end-weight-decay 0.3")
    assert problem.startswith(
        "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cos"
    )


def test_what_a_mistyped_flag_was_meant_to_be_is_not_missing_as_well():
    words = "--num-layer 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3"
    parsed = parse_flags([*words.split(), "--train-iters", "2", "--vocab-size", "20", "--mock-data"])
    with pytest.raises(ConfigError) as caught:
        resolve(parsed, 1)
    assert caught.value.problems == ["unknown flag --num-layer; did you mean --num-layers?"]
