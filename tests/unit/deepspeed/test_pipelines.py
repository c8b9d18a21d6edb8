"""Tests of DeepSpeed's pipelines: each pass is in its step, each message has two ends; grids of processes."""

from itertools import pairwise

import pytest
from gptpar.deepspeed.runtime.pipe.schedule import DataParallelSchedule, InferenceSchedule, TrainSchedule

from gptpar.deepspeed.grid import PipeModelDataParallelTopology, ProcessTopology, _two_factors


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


def test_queries_of_a_grid() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert (grid.world_size(), grid.get_axis_names(), grid.get_dim("data")) == (12, ["pipe", "data", "model"], 3)
    assert grid.get_rank(pipe=1, data=2, model=0) == 10 and grid.get_coord(10).data == 2
    assert grid.get_axis_comm_lists("pipe")[0] == [0, 6] and grid.get_axis_list("data", 1) == [2, 3, 8, 9]
    assert grid.filter_match(pipe=0, model=1) == [1, 3, 5]
    assert grid.get_rank_repr(10) == "model_00" and grid.get_rank_repr(10, omit_axes=["model"]) == "pipe_01-data_02"
    with pytest.raises(ValueError, match="there is no rank 12 among 12"):
        grid.get_coord(12)
    with pytest.raises(ValueError, match="each of the axes"):
        ProcessTopology(["x", "y"], [2, 2]).get_rank(x=1)


def test_two_factors() -> None:
    assert [_two_factors(number) for number in (1, 2, 7, 8, 12)] == [(1, 1), (2, 1), (7, 1), (4, 2), (6, 2)]
    with pytest.raises(ValueError, match="0 has no prime factors"):
        _two_factors(0)
