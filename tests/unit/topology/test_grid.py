"""The grid of ranks and batch plans."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gptpar.topology.groups import _new_group
from gptpar.topology.mesh import (
    CONTEXT,
    COPIES,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    REST_OF_CONTEXT,
    REST_OF_DATA,
    ROWS,
    TENSOR,
    Mesh,
    copies_over,
    rows_of,
)
from gptpar.topology.world import environment_problems

LAYOUTS = [Mesh(), Mesh(3, 4, 1), Mesh(1, 2, 5), Mesh(6, 2, 2, expert=2), Mesh(4, 1, 2, expert=2, context=4)]


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_groups_of_axes_partition_the_ranks(mesh: Mesh) -> None:
    """And ranks are the inverse of their positions."""
    seen = [{axis: mesh.position(rank, axis) for axis in ROWS} for rank in range(mesh.world_size)]
    assert [mesh.rank(**place) for place in seen] == list(range(mesh.world_size))
    several: list[tuple[str, ...]] = [(DATA, TENSOR), (EXPERT, PIPELINE), ()]
    for axes in [*((axis,) for axis in (*ROWS, DATA, CONTEXT, EXPERT, EXPERT_DATA)), *several]:
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            assert len(group) == math.prod(map(mesh.size, axes)) and group == sorted(group)
            others = [[seen[rank][axis] for axis in ROWS if axis not in rows_of(axes)] for rank in group]
            assert all(other == others[0] for other in others)
            if len(axes) == 1:
                assert [mesh.position(rank, axes[0]) for rank in group] == list(range(mesh.size(*axes)))


def test_tensor_axis_is_fastest_then_data_then_pipeline() -> None:
    mesh = Mesh(data=2, tensor=2, pipeline=2)
    neighbours = [[mesh.position(rank, axis) for axis in (DATA, TENSOR, PIPELINE)] for rank in (0, 1, 2, 4)]
    assert neighbours == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_the_expert_axis_is_folded_over_context_and_data() -> None:
    mesh = Mesh(data=4, tensor=2, expert=2)
    axes = [(DATA,), (EXPERT,), (EXPERT_DATA,), (DATA, TENSOR)]
    assert (mesh.world_size, *(mesh.size(*one) for one in axes)) == (8, 4, 2, 2, 8)
    assert mesh.groups(DATA)[0] == [0, 2, 4, 6]
    assert mesh.groups(EXPERT) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups(EXPERT_DATA) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [mesh.position(rank, DATA) for rank in range(0, 8, 2)] == [0, 1, 2, 3]
    with_context = Mesh(data=2, context=4, expert=2)
    assert with_context.groups(EXPERT) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert with_context.groups(EXPERT_DATA) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert with_context.groups(CONTEXT) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Mesh(data=2, context=2, expert=4).groups(EXPERT) == [[0, 1, 2, 3]]
    assert [mesh.rank(expert=1), mesh.rank(data=3, tensor=1)] == [2, 7]
    of_experts = REST_OF_CONTEXT, REST_OF_DATA
    splits: list[list[str]] = [[], [TENSOR], [EXPERT], [EXPERT, TENSOR]]
    assert [copies_over(split) for split in splits] == [COPIES, COPIES, of_experts, of_experts]
    with pytest.raises(ValueError, match="2 expert-parallel processes do not divide 3 that have other tokens"):
        Mesh(data=3, expert=2)


MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "problems"),
    [
        ({}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEET}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_LOCALID": "1", "SLURM_PROCID": "1", **MEET}, []),
        ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE=abc is not a whole number", "of RANK and WORLD_SIZE only one is set"]),
        ({"RANK": "5", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ["RANK=5 is not below WORLD_SIZE=1"]),
        (
            {"RANK": "-1", "WORLD_SIZE": "2"},
            [
                "RANK=-1 is not a whole number",
                "MASTER_ADDR and MASTER_PORT not set: the address at which the processes meet",
                "LOCAL_RANK is not set: which of 4 GPUs is this process's",
            ],
        ),
    ],
)
def test_what_is_wrong_with_the_environment(environment: dict[str, str], problems: list[str]) -> None:
    assert environment_problems(environment, 4) == problems


def test_the_groups_of_axes_wait_as_long_as_the_world() -> None:
    """A hung process is noticed after the time that was asked for, on every axis."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = _new_group([0])
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
