"""Flags whose values cannot be, would be ignored, or contradict others: what is told, and that nothing else is."""

import pytest

from tests.helpers import TINY
from tests.unit.config.flag_problems import GOOD, problems

# Each row: the flags, and for each problem that must be told a part of its sentence.
VALUES = [
    ("--num-layer 3", "unknown flag --num-layer; did you mean --num-layers?"),
    ("--clip_grade 1", "unknown flag --clip_grade; did you mean --clip-grad?"),
    ("--lr 1e-3 foo a=b", "unexpected words 'foo', 'a=b'; values follow a flag."),
    ("--position-embedding-type rope --rotary-percent 0.2", "of a head of 8 is 1: choose an even number"),
    ("--global-batch-size 7", "not a multiple of --micro-batch-size 2 x 1 data-parallel process(es) = 2: the"),
    ("--rampup-batch-size 2 2 100", "--rampup-batch-size needs --train-samples or --train-tokens"),
    ("--min-lr 1", "--min-lr 1 must lie between 0 and --lr 0.01"),
    ("--cuda-graph on --hidden-dropout 0.1", "--cuda-graph on: dropout is seeded by the host"),
    ("--deepspeed_config ds.json", "--deepspeed_config ds.json is read with --deepspeed only: add it."),
    ("--data-path a", "data is given twice", "a.bin and a.idx not found; gptpar preprocess makes them from text."),
    ("--eod-mask-loss", "need to know the end-of-document id"),
    ("--glu-activation x", "it takes one of swiglu, geglu, geglu_tanh, quick_geglu, reglu, liglu."),
    ("--data-parallel-sharding-strategy optim", "is for --use-megatron-fsdp: give that flag, too, or --zero-stage N."),
    ("--use-z-loss --z-loss-weight 1e-5", "--use-z-loss means --z-loss-weight 0.0001, and --z-loss-weight 1e-05 is"),
    ("--num-query-groups 2 --attention-head-type multiquery", "means --num-query-groups 1, and --num-query-groups 2"),
    ("--attention-head-type multi", "leave it out, or give multihead or multiquery."),
    ("--fim-rate 0.5", "--fim-rate 0.5: fill-in-the-middle training is not part of gptpar"),
]
SIZES = [
    ("--hidden-size 1e18", "--hidden-size is 1e+18; it must be at most 1,000,000."),
    ("--lr-warmup-init=-1e39", "--lr-warmup-init is -1e+39; its size must be at most"),
    ("--vocab-size 3e9", "--vocab-size is 3e+09; it must be at most 2,147,483,647, as token ids have 32 bits."),
    ("--num-layers 10000 --hidden-size 1000000", "the model would have 1.2e+17 parameters (--num-layers 10000,"),
    ("--micro-batch-size 1000000 --seq-length 100000000", "one activation would have 1.28e+16 elements"),
    ("--eval-iters 1e17 --eval-interval 1", "21 evaluations of --eval-iters 100000000000000000 would"),
]
EIGHT = "--exp-avg-dtype fp8 --adam-beta1"
EIGHT_BITS = [
    (f"{EIGHT} 0.9 --adam-beta2 0.999",),
    (f"{EIGHT} 0 --adam-beta2 0",),
    (f"{EIGHT} 0.5 --adam-beta2 0.999", "it may be 18.3 of them: take bf16 or fp32."),
    (f"{EIGHT} 0.9 --adam-beta2 0.9999", "it may be 22.9 of them: take bf16 or fp32."),
    (f"{EIGHT} 0.9 --adam-beta2 0.5", "it may be inf of them: take bf16 or fp32."),
]
MOE = "--num-experts 8 --disable-bias-linear"
GROUPS = "--moe-router-score-function sigmoid --moe-router-num-groups 3 --moe-router-group-topk 2"
EXPERTS = [
    (f"{MOE} --moe-expert-parallel-size 2", "--expert-model-parallel-size 2 does not divide the 1 process"),
    ("--moe-router-topk 3", "--moe-router-topk: these are for experts, and --num-experts is 1: raise it, or leave"),
    (f"{MOE} --moe-router-topk 1", "--moe-router-topk 1 with a softmax over the chosen expert alone weighs it"),
    (f"{MOE} --moe-layer-freq [0]*1+[1]*9", "--moe-layer-freq lists 10 blocks, and --num-layers is 2: list"),
    (f"{MOE} {GROUPS}", "--moe-router-num-groups 3, --moe-router-group-topk"),
    (f"{MOE} --moe-expert-capacity-factor 4", "--moe-expert-capacity-factor 4 limits nothing: from"),
    (f"{MOE} --mup --mup-base-hidden-size 2 --optimizer muon", "--mup has a rule for Muon's update of a router with"),
    (f"{MOE} --cuda-graph on", "--cuda-graph on: experts of width"),
]
MUON = [
    ("--optimizer muon --muon-tp-mode blockwise", "a matrix is orthogonalized whole"),
    ("--optimizer muon --muon-scalar-optimizer lion", "AdamW updates what Muon does not"),
    ("--optimizer muon --muon-num-ns-steps 6", "takes 5, 10, ... iterations"),
    ("--optimizer muon --muon-no-nesterov --muon-nesterov", "keep one"),
    ("--optimizer muon --lr 0 --muon-lr 0.02", "give a rate above 0"),
    ("--optimizer muon --exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16 is built for --optimizer adam alone"),
]


@pytest.mark.parametrize("row", [*VALUES, *SIZES, *EIGHT_BITS, *EXPERTS, *MUON], ids=lambda row: row[0])
def test_what_cannot_be_is_told_with_numbers_and_a_remedy(row: tuple[str, ...]) -> None:
    flags, *told = row
    found = problems(flags)
    assert len(found) == len(told) and all(part in one for part, one in zip(told, found, strict=True)), found


TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
CONTEXT = "--context-parallel-size 4 --num-attention-heads 6"
ON_EIGHT_PROCESSES = [
    (f"{TENSOR} 3", "8 processes cannot be cut into groups of 3 x 1 = 3 (tensor x pipeline): start a multiple of 3"),
    (f"--num-attention-heads 6 {TENSOR} 4", f"6 is not divisible by {TENSOR} 4; sizes that fit: 1, 2, 3, 6."),
    (f"--sequence-parallel {TENSOR} 4 --seq-length 7", "the 2 x 7 = 14 tokens of a micro-batch are not divisible by"),
    (f"--num-layers 3 {PIPELINE} 4 {VIRTUAL} 2", "4 x 2 virtual stage(s) = 8 parts, but there are only 3 + 4 = 7"),
    (f"{VIRTUAL} 2", "but --pipeline-model-parallel-size is 1: raise it to at least 2, or drop the flags"),
    (f"--partition-method 0,7,14 {PIPELINE} 2", "0,7,14: the last boundary is 14, but there are 16 layers"),
    (
        f"--recompute-activations --checkpoint-in-cpu --partition-activations {TENSOR} 2",
        "--distribute-saved-activations needs --recompute-granularity full.",
        "--checkpoint-in-cpu needs --recompute-granularity full.",
    ),
    (
        "--recompute-granularity full --cpu-offloading-num-layers 99",
        "--cpu-offloading-num-layers 99 is more than --num-layers 12: give at most 12.",
        "--cpu-offloading-num-layers 99 is for blocks that are not recomputed as a whole: give --checkpoint-in-cpu",
    ),
    (f"{CONTEXT} --attention-dropout 0 --seq-length 30", "30 is not divisible by 8: the nearest length is 32."),
    (f"{CONTEXT} --attention-dropout 0 --cp-comm-type a2a", "6 heads of a tensor rank are not divisible by 4: give"),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-query-groups 2 --attention-dropout 0.1",
        "masks of --attention-dropout 0.1 belong to whole query groups, and the 2 of a tensor rank are not divisible",
    ),
]


@pytest.mark.parametrize("row", ON_EIGHT_PROCESSES, ids=lambda row: row[0])
def test_what_cannot_be_laid_out_is_told_once_each(row: tuple[str, ...]) -> None:
    flags, *told = row
    found = problems(flags, 8, GOOD)
    assert len(found) == len(told) and all(part in one for part, one in zip(told, found, strict=True)), found


def test_all_problems_of_a_line_are_told_beside_a_word_among_numbers() -> None:
    flags = "--train-samples 9 --rampup-batch-size 16 x 1000 --num-layer 3 --hidden-size 34"
    assert problems(flags, start=TINY.replace("--train-iters 20 ", "")) == [
        "--rampup-batch-size x: a whole number is needed.",
        "unknown flag --num-layer; did you mean --num-layers?",
        "--hidden-size 34 is not divisible by --num-attention-heads 4: use 32 or 36, or give --kv-channels.",
    ]


@pytest.mark.parametrize(("flag", "text"), [("--save", ""), ("--data-path", "  "), ("--seed", "")])
def test_an_empty_text_is_an_unset_variable(flag: str, text: str) -> None:
    (problem,) = problems([flag, text])
    assert problem.startswith(f"{flag}") and "perhaps by an unset shell variable: set it, or leave the flag" in problem
