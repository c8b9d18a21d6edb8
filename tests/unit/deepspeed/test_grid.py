"""Grids of processes by DeepSpeed's names."""

import pytest

from gptpar.deepspeed.grid import PipeModelDataParallelTopology, ProcessTopology, _two_factors


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
