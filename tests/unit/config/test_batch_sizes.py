"""Batch sizes that change with the tokens consumed, growing batches, and where runs end."""

import json
from typing import Any

import pytest

from gptpar.config import BatchConfig, Config
from gptpar.config.batch_sizes import BatchSizes, read_schedule
from gptpar.config.stored import stored_config
from gptpar.config.validate import complete
from gptpar.optim.schedule import make_schedule
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.progress import Progress
from tests.helpers import TINY, every_field
from tests.unit.config import flag_problems

MODEL = TINY.replace("--train-iters 20 ", "")  # 16 tokens a sample, micro-batch 2


def resolved(flags: str, schedule: str = "") -> Config:
    schedules = ["--step-batch-size-schedule", schedule] if schedule else []
    return flag_problems.resolved([*flags.split(), *schedules], start=MODEL)


def stored_of(config: Config) -> dict[str, Any]:
    """As a checkpoint has it."""
    return json.loads(json.dumps(config.to_dict()))


def read_back(stored: dict[str, Any]) -> Config:
    return complete(stored_config(stored, every_field(stored))[0])


def sizes_of(plan: BatchPlan, done: Progress | None = None) -> list[int]:
    """The batches that the loop would fetch from there on."""
    now, found = done or Progress(), []
    while not plan.finished(now):
        found.append(plan.global_batch_size(now.consumed_samples))
        now = Progress(now.iteration + 1, now.consumed_samples + found[-1])
    return found


def test_thresholds_are_tokens_with_suffixes_as_in_megatron() -> None:
    """GPT-3's schedule in Megatron-LM's example, at 2,048 tokens a sample; samples are rounded down."""
    text = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    table = ((0, 16), (1171875, 320), (2343750, 624), (3515625, 928), (4687500, 1232), (5859375, 1536))
    assert read_schedule([text], 2048) == read_schedule(text.split(), 2048) == table
    assert read_schedule(["100k:1K,0:8 , 5e3:16"], 100) == ((0, 8), (50, 16), (1000, 1000))
    assert read_schedule(["0:2 1.5M:4 0.001T:6"], 1) == ((0, 2), (1_500_000, 4), (1_000_000_000, 6))
    assert read_schedule(["0:2 4.35B:4"], 1)[1][0] == 4_350_000_000  # not 4,349,999,999 as in floating point
    assert read_schedule(["0:2 33:4"], 16) == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("16", "'16': TOKENS:SIZE is needed, for example 2.4B:320"),
        ("0:2 x:4 9:-4", "'x:4': 'x' is not a number, with K, M, B or T behind it if need be; '9:-4': -4 is not"),
        ("0:2 1e999999999:4", "1e999999999 is not between 0 and 100,000,000,000,000,000"),
        ("0:2 16:4 17:6", "the sizes 4 and 6 begin at the same sample (1, of 16 tokens each)"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_told(text: str, told: str) -> None:
    words = ["--train-iters", "5", "--step-batch-size-schedule", text]
    (problem,) = flag_problems.problems(words, start=MODEL)
    assert problem.startswith("--step-batch-size-schedule: ") and told in problem


def test_each_number_of_a_stored_ramp_is_checked() -> None:
    config = resolved("--train-samples 50 --global-batch-size 8 --rampup-batch-size 2 2 20")
    stored = stored_of(config)
    assert read_back(stored) == config
    stored["batch"]["rampup_batch_size"][1] = 2**62
    (problem,) = stored_config(stored, every_field(stored))[2]
    assert "config.batch.rampup_batch_size" in problem and "at most" in problem


def test_batches_of_a_schedule_by_hand() -> None:
    """2 from sample 0, 4 from sample 5, 8 from sample 15; a step has the size that holds where it starts."""
    config = resolved("--train-samples 50", "0:2 80:4 240:8")
    assert config.batch.batch_sizes == ((0, 2), (5, 4), (15, 8)) and config.batch.global_batch_size == 8
    assert read_back(stored_of(config)) == config
    plan = BatchPlan.of(config.batch)
    # 0 2 4 | 6 10 14 | 18 26 34 42 -> 50
    assert sizes_of(plan) == [2, 2, 2, 4, 4, 4, 8, 8, 8, 8]
    assert (plan.num_iterations(), plan.full, plan.train_samples) == (10, 8, 50)
    there = Progress(iteration=4, consumed_samples=10)
    going_on = BatchPlan.of(config.batch, there)
    assert sizes_of(going_on, there) == [4, 4, 8, 8, 8, 8] and going_on.num_iterations() == 10
    in_steps = BatchPlan.of(resolved("--train-iters 8", "0:2 80:4 240:8").batch)
    assert (sizes_of(in_steps), in_steps.train_samples, in_steps.num_iterations()) == ([2, 2, 2, 4, 4, 4, 8, 8], 34, 8)
    falling = BatchPlan.of(resolved("--train-iters 4", "0:8 160:2").batch)
    assert sizes_of(falling) == [8, 8, 2, 2]


def test_sizes_agree_with_counting_step_by_step() -> None:
    batches = [
        BatchConfig(micro_batch_size=1, global_batch_size=8, batch_sizes=((0, 2), (5, 4), (6, 6), (7, 3), (40, 8))),
        BatchConfig(micro_batch_size=1, global_batch_size=64, rampup_batch_size=(4, 2, 1001)),
        BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 0 + 1)),
        BatchConfig(micro_batch_size=1, global_batch_size=5),
    ]
    for sizes in map(BatchSizes.of, batches):
        for consumed in (0, 3, 6, 41):
            now = consumed
            for steps in range(60):
                assert sizes.samples_after(steps, consumed) == now
                assert sizes.steps_within(now, consumed) == steps
                assert sizes.steps_within(now + sizes.at(now) - 1, consumed) == steps
                now += sizes.at(now)


@pytest.mark.parametrize(
    "ramp", [(32, 32, 1953125, 256), (2, 2, 24, 8), (16, 8, 300000, 1024), (1, 3, 7, 10), (4, 4, 1, 64)]
)
def test_a_growing_batch_is_megatrons_formula(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, full = ramp
    sizes = BatchSizes.of(
        BatchConfig(micro_batch_size=1, global_batch_size=full, rampup_batch_size=(start, increment, samples))
    )
    span = samples / ((full - start) / increment)
    near = {round(k * span) + d for k in range(20) for d in (-1, 0, 1)} | {samples - 1, samples, samples + 1}
    for consumed in (n for n in near if n >= 0):
        size = full if consumed > samples else min(full, start + int(consumed / span) * increment)
        assert sizes.at(consumed) == size, consumed


@pytest.mark.parametrize(
    "flags",
    [
        "--train-samples 20 --train-tokens 64",
        "--train-iters 10 --train-tokens 64",
        "--train-iters 2 --train-tokens 640",
    ],
)
def test_tokens_beside_samples_or_steps_end_the_run_where_either_is_reached(flags: str) -> None:
    config = resolved(flags)
    plan = BatchPlan.of(config.batch)
    assert (plan.num_iterations(), sizes_of(plan), plan.train_samples) == (2, [2, 2], 4)
    assert make_schedule(config, plan.train_samples).decay == 4


@pytest.mark.parametrize("length", ["--train-iters 9 --lr-decay-iters 8", "--train-samples 99 --lr-decay-samples 88"])
def test_the_decay_has_one_length(length: str) -> None:
    flag, value = length.split()[2:]
    alone = resolved(f"{length.rsplit('--', 1)[0]} --lr-decay-tokens 64")
    assert make_schedule(alone, 18).decay == 64
    (told,) = flag_problems.problems(f"{length} --lr-decay-tokens 64", start=MODEL)
    assert told == f"{flag} {value} and --lr-decay-tokens 64 are one length: keep one of them."
