"""Flags of layouts, batches and recomputation: what follows from them, and what cannot be."""

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.unit.config.flag_problems import GOOD, problems

WORLD = 8


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--num-attention-heads 6 --tensor-model-parallel-size 4",
            ["--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4; sizes that fit: 1, 2, 3, 6."],
        ),
        (
            "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 7",
            [
                "--sequence-parallel: the 2 x 7 = 14 tokens of a micro-batch are not divisible by "
                "--tensor-model-parallel-size 4: make --micro-batch-size or --seq-length a multiple of it."
            ],
        ),
        (
            "--num-layers 3 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            [
                "--pipeline-model-parallel-size 4 x 2 virtual stage(s) = 8 parts, but there are only 3 + 4 = 7 layers "
                "(embedding, positions, blocks, final norm, output): use at most 7 parts."
            ],
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            [
                "virtual stages interleave the work of a pipeline, but --pipeline-model-parallel-size is 1: raise it "
                "to at least 2, or drop the flags for virtual stages."
            ],
        ),
        (
            "--partition-method 0,7,14 --pipeline-model-parallel-size 2",
            [
                "--partition-method 0,7,14: the last boundary is 14, but there are 16 layers (4 beside the blocks: "
                "embedding, positions, final norm, output): end with 16."
            ],
        ),
        (
            "--recompute-activations --checkpoint-in-cpu --partition-activations --tensor-model-parallel-size 2",
            [
                "--distribute-saved-activations needs --recompute-granularity full.",
                "--checkpoint-in-cpu needs --recompute-granularity full.",
            ],
        ),
        (
            "--recompute-granularity full --cpu-offloading-num-layers 99 --num-layers 12",
            [
                "--cpu-offloading-num-layers 99 is more than --num-layers 12: give at most 12.",
                "--cpu-offloading-num-layers 99 is for blocks that are not recomputed as a whole: give "
                "--checkpoint-in-cpu, which keeps the inputs of those that are in host memory, or "
                "--recompute-granularity selective.",
            ],
        ),
        (
            "--context-parallel-size 4 --seq-length 30 --num-attention-heads 6 --attention-dropout 0",
            [
                "--context-parallel-size 4 with --cp-comm-type allgather: --seq-length 30 is not divisible by 8: the "
                "nearest length is 32."
            ],
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 6 --attention-dropout 0",
            [
                "--context-parallel-size 4 with --cp-comm-type a2a: 6 heads of a tensor rank are not divisible by 4: "
                "give --cp-comm-type allgather; sizes that fit: 1, 2, 3, 6."
            ],
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a --num-query-groups 2 --attention-dropout 0.1",
            [
                "--context-parallel-size 4 with --cp-comm-type a2a: masks of --attention-dropout 0.1 belong to whole "
                "query groups, and the 2 of a tensor rank are not divisible by 4: give --cp-comm-type allgather, which "
                "computes attention for all tokens, or --attention-dropout 0."
            ],
        ),
    ],
)
def test_what_cannot_be_laid_out_is_told_once_each(flags: str, expected: list[str]) -> None:
    found = problems(flags, WORLD)
    assert len(found) == len(expected)
    assert all(sentence.startswith(start) for sentence, start in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 4 --sequence-parallel --no-tp-comm-overlap --vocab-size 50257",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 3",
        "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
        "--pipeline-model-parallel-size 4 --global-batch-size 12 --partition-method 0,5,9,12,16",
        "--pipeline-model-parallel-size 4 --partition-method type:Block --grad-reduce-in-bf16",
        "--no-pipeline-parallel --zero-stage 0 --bf16",
        "--overlap-param-gather --ddp-bucket-size 4000000 --synchronize-each-layer --contigious-checkpointing "
        "--checkpoint-activations --checkpoint-num-layers 1 --tp-comm-overlap --deepspeed-activation-checkpointing",
    ],
)
def test_layouts_that_can_run(flags: str) -> None:
    assert problems(flags, WORLD) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "stage", "reason"),
    [
        ("", 8, 0, "every process holds"),
        ("--no-pipeline-parallel", 8, 3, "--no-pipeline-parallel with 8 copies of the weights"),
        ("--no-pipeline-parallel", 1, 0, "every process holds"),
        ("--no-pipeline-parallel --tensor-model-parallel-size 4", 4, 0, "every process holds"),
        ("--use-distributed-optimizer", 8, 1, "--use-distributed-optimizer"),
        ("--use-distributed-optimizer --zero-stage 2", 8, 2, None),
    ],
)
def test_zero_stage_follows_from_the_layout(flags: str, world_size: int, stage: int, reason: str | None) -> None:
    config, derived = resolve(parse_flags(f"{GOOD} {flags}".split()), world_size)
    assert config.parallel.zero_stage == stage
    reasons = {d.name: d.reason for d in derived}
    assert "zero stage" not in reasons if reason is None else reasons["zero stage"].startswith(reason)
