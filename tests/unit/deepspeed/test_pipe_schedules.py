"""Tests of DeepSpeed's schedules: each pass is in its step, and each message has two ends."""

from itertools import pairwise

import pytest
from gptpar.deepspeed.runtime.pipe.schedule import DataParallelSchedule, InferenceSchedule, TrainSchedule


def _steps(schedule: type, stages: int, micro_batches: int) -> list[list[list[str]]]:
    made = [schedule(micro_batches=micro_batches, stages=stages, stage_id=stage) for stage in range(stages)]
    return [[[command.name for command in commands] for commands in one] for one in made]


def _of(steps: list[list[str]], name: str) -> list[int]:
    return [at for at, commands in enumerate(steps) if name in commands]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_passes_are_in_their_steps_and_messages_have_two_ends(stages: int, micro_batches: int) -> None:
    train = _steps(TrainSchedule, stages, micro_batches)
    assert {len(steps) for steps in train} == {2 * (micro_batches + stages - 1)}
    for stage, steps in enumerate(train):
        assert _of(steps, "ForwardPass") == [2 * m + stage for m in range(micro_batches)]
        assert _of(steps, "BackwardPass") == [2 * (m + stages) - 1 - stage for m in range(micro_batches)]
        assert steps[-1][-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    for steps in (train, _steps(InferenceSchedule, stages, micro_batches)):
        for here, following in pairwise(steps):
            assert _of(here, "SendActivation") == _of(following, "RecvActivation")
            assert _of(here, "RecvGrad") == _of(following, "SendGrad")


def test_buffers_hold_the_micro_batches_that_are_under_way() -> None:
    for stage in range(3):
        schedule, held = TrainSchedule(micro_batches=5, stages=3, stage_id=stage), set()
        for command in (command for commands in schedule for command in commands):
            if command.name == "ForwardPass":
                assert command.buffer_id not in held
                held.add(command.buffer_id)
            elif command.name == "BackwardPass":
                held.remove(command.buffer_id)
        assert schedule.num_pipe_buffers() == max(2, 3 - stage) and not held
    (single,) = DataParallelSchedule(micro_batches=1, stages=1, stage_id=0)
    passes = "LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0)"
    assert str(single) == f"[{passes}, ReduceGrads(), OptimizerStep()]"
