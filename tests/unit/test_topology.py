"""The grid of ranks, batch plans and the choice for a machine."""

from __future__ import annotations

import socket

import pytest

from gptpar.config.training import BatchConfig
from gptpar.errors import GptparError
from gptpar.fit import Machine, choose
from gptpar.topology import Layout, environment_problems, open_world, world_from_environment
from gptpar.training.batch_plan import BatchPlan
from gptpar.training.progress import Progress

GIB = 1 << 30


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(3, 4, 1), Layout(1, 2, 5), Layout()])
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.rank(*place) for place in seen] == list(range(layout.world_size))


def test_tensor_axis_is_fastest_then_data_then_pipeline() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert [layout.coordinates(r) for r in (0, 1, 2, 4)] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(3, 4, 1), Layout(1, 2, 5), Layout()])
def test_groups_of_each_axis_partition_the_ranks(layout: Layout) -> None:
    axes = [(layout.data_groups(), layout.data), (layout.tensor_groups(), layout.tensor)]
    for number, (groups, size) in enumerate([*axes, (layout.chains(), layout.pipeline)]):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            places = [layout.coordinates(rank) for rank in group]
            assert [place[number] for place in places] == list(range(size))
            assert len({place[:number] + place[number + 1 :] for place in places}) == 1


def test_groups_of_eight() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert layout.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.chains() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_ramp_follows_megatrons_rule() -> None:
    plan = BatchPlan.of(
        BatchConfig(global_batch_size=256, rampup_batch_size=(32, 32, 1953125), train_samples=439453125)
    )
    span = 1953125 / 7
    sizes = [plan.global_batch_size(n) for n in (0, int(span), int(span) + 1, 1953125, 1953126)]
    assert sizes == [32, 32, 64, 256, 256]
    steps, consumed = 0, 0
    while consumed <= 1953125:
        consumed += plan.global_batch_size(consumed)
        steps += 1
    assert plan.num_iterations() == steps + (439453125 - consumed) // 256


def test_a_plan_without_ramp_counts_whole_batches() -> None:
    plan = BatchPlan.of(BatchConfig(global_batch_size=8, train_samples=63))
    assert plan.num_iterations() == 7
    assert plan.finished(Progress(consumed_samples=56)) and not plan.finished(Progress(consumed_samples=48))
    assert BatchPlan.of(BatchConfig(global_batch_size=8, train_iters=5)).train_samples == 40


def test_a_run_counted_in_steps_ends_by_steps_whatever_its_batches_were() -> None:
    """Four steps of 2 samples, then a global batch of 4: four more steps, 8 + 16 samples."""
    plan = BatchPlan.of(BatchConfig(global_batch_size=4, train_iters=8), Progress(iteration=4, consumed_samples=8))
    assert (plan.train_samples, plan.num_iterations()) == (24, 8)
    assert not plan.finished(Progress(iteration=7, consumed_samples=20))
    assert plan.finished(Progress(iteration=8, consumed_samples=24))


def chosen(machine: Machine, vocab_size: int = 1024) -> dict[str, str]:
    return {choice.flag: choice.value for choice in choose(machine, "350M", vocab_size, minutes=5)}


def test_choice_for_two_cpu_cores() -> None:
    flags = chosen(Machine(0, "bf16", 20 * GIB, 0.6 * 700e9, "test"))
    assert flags["seq-length"] == "128" and flags["micro-batch-size"] == "4" and "bf16" in flags
    assert 100 <= int(flags["train-iters"]) <= 240 and flags["lr-warmup-fraction"] == "0.1"


def test_choice_for_four_gpus() -> None:
    flags = chosen(Machine(4, "bf16", 80 * GIB, 4 * 0.35 * 989e12, "test"), 8192)
    assert (flags["seq-length"], flags["micro-batch-size"], flags["global-batch-size"]) == ("1024", "16", "64")
    assert flags["train-iters"] == "1000"
    small = chosen(Machine(1, "fp16", 16 * GIB, 0.35 * 125e12, "test"), 8192)
    assert int(small["micro-batch-size"]) < 16 and small["global-batch-size"] == "16" and "fp16" in small


def test_a_model_that_cannot_fit_is_refused_with_numbers() -> None:
    with pytest.raises(GptparError, match=r"needs \d+\.\d+ GiB .* has 4\.00 GiB free"):
        choose(Machine(0, "bf16", 4 * GIB, 1e12, "test"), "350M", 1024, 5)


MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "problems"),
    [
        ({}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEET}, []),
        ({"RANK": "0", "WORLD_SIZE": "1"}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_LOCALID": "1", "SLURM_PROCID": "1", **MEET}, []),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK=x is not a whole number"]),
        ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE=abc is not a whole number", "of RANK and WORLD_SIZE only one is set"]),
        ({"RANK": "5", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ["RANK=5 is not below WORLD_SIZE=1"]),
        (
            {"RANK": "-1", "WORLD_SIZE": "2"},
            [
                "RANK=-1 is not a whole number",
                "MASTER_ADDR and MASTER_PORT not set, where the processes meet",
                "LOCAL_RANK is not set, which says which of 4 GPUs is this process's own",
            ],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "http"},
            ["MASTER_PORT=http is not a whole number"],
        ),
    ],
)
def test_what_is_wrong_with_the_environment(environment: dict[str, str], problems: list[str]) -> None:
    assert environment_problems(environment, 4) == problems


def test_processes_without_a_local_rank_may_see_one_gpu_each() -> None:
    assert environment_problems({"RANK": "1", "WORLD_SIZE": "2", **MEET}, 1) == []


def test_a_wrong_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(GptparError, match=r"no process of a run: RANK=5 is not below WORLD_SIZE=1\. Start .* torchrun"):
        world_from_environment()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEET, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        message = f"did not meet at 127.0.0.1:{port} .*choose another MASTER_PORT"
        with pytest.raises(GptparError, match=message), open_world("gloo", 0.05):
            pass
