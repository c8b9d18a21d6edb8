"""The machine's memory and cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar import host
from gptpar.config.checks.offload import check_offload
from gptpar.config.graph import graph_obstacles, wants_graph
from gptpar.optim.buckets import HostPiece, cut_piece
from gptpar.optim.runs import Run
from gptpar.optim.schedule import make_schedule
from gptpar.topology import Layout, Topology
from gptpar.training.auto_ratio import any_batches, smallest_ratio, with_ratio
from gptpar.training.trainer import Trainer
from tests.helpers import tiny_config


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    free = host.available_memory()
    assert free > 1 << 28
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert host.available_memory() == 3000000 - 2500000 + 400000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_memory() > 1 << 28


def test_cores_are_shared_out_as_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: [0, 1, 2, 3, 8, 9, 10])
    shares = [host.share_of_cores(place, 3) for place in range(3)]
    assert shares == [[0, 1], [2, 3], [8, 9, 10]]
    assert host.share_of_cores(0, 1) == [0, 1, 2, 3, 8, 9, 10]
    assert all(host.share_of_cores(place, 20) for place in range(20))  # more processes than cores


def test_the_smallest_ratio_that_fits() -> None:
    assert smallest_ratio(16 * 1000, 1000, 16) == 0.0
    assert smallest_ratio(14 * 400, 1000, 14) == 0.6
    assert smallest_ratio(14 * 400 - 1, 1000, 14) == 0.601
    assert smallest_ratio(-5, 1000, 16) == 1.0


def test_without_a_gpu_auto_is_nothing() -> None:
    config = tiny_config("--cpu-optimizer --cpu-optimizer-ratio auto")
    assert config.offload.ratio is None
    found = with_ratio(config, Topology(Layout(), 0, torch.device("cpu")))
    assert found.offload.ratio == 0.0


def test_state_in_files_is_ordinary_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (bucket,) = cut_piece(HostPiece("unit", 1000, (Run(0, 1000, True, False, True),)), torch.float32, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for buffer in bucket.now.all():
        assert buffer.shape == (1000,) and not buffer.any()
        buffer.fill_(2.5)
    assert bucket.now.weights.sum() == 2500


def test_what_needs_the_host_during_a_step_speaks_against_a_graph() -> None:
    plain = tiny_config()
    assert wants_graph(plain, 1) and not list(graph_obstacles(plain, 4))
    for words, data_parallel, reason in (
        ("--hidden-dropout 0.1", 1, "dropout"),
        ("--zero-stage 3", 2, "--zero-stage 3"),
        ("--cpu-optimizer", 2, "--cpu-optimizer"),
        ("--cpu-parameters", 1, "--cpu-parameters"),
        ("--recompute-granularity full --checkpoint-in-cpu", 1, "--checkpoint-in-cpu"),
    ):
        config = tiny_config(words)
        (found,) = graph_obstacles(config, data_parallel)
        assert found.startswith(reason) and not wants_graph(config, data_parallel), words
    assert wants_graph(tiny_config("--cpu-optimizer"), 1)
    assert wants_graph(tiny_config("--zero-stage 3"), 1)  # nothing is shared out by one process
    assert not wants_graph(tiny_config("--zero-stage 1"), 2) and not wants_graph(tiny_config("--cuda-graph off"), 1)


def test_a_folder_for_files_must_be_one() -> None:
    config = tiny_config().update(
        "offload", cpu_optimizer=True, optimizer_nvme_path="/nowhere", offload_speculation="on"
    )
    assert [problem.split(" ", 2)[0] for problem in check_offload(config)] == [
        "--offload-speculation",
        "--optimizer-nvme-path",
    ]


def test_a_trial_runs_the_passes_without_any_optimizer_state() -> None:
    config = tiny_config("--cpu-optimizer --bf16 --global-batch-size 8 --lr-warmup-iters 2 --lr-decay-style cosine")
    topology = Topology(Layout(), 0, torch.device("cpu"))
    trainer = Trainer(config, topology, make_schedule(config, 0), tries_memory=True)
    trainer.initialise()
    loss = trainer.forward_backward(any_batches(config, topology), 0)
    assert loss.isfinite() and trainer.model.host is None
    optimizer = trainer.model.optimizer
    assert optimizer.master.numel() == optimizer.grad.numel() == 0 and trainer.model.division.ratio == 1
    trainer.close()


def test_a_trial_has_as_many_micro_batches_as_are_ever_alive() -> None:
    layout = Layout(pipeline=2)
    topology = Topology(layout, 0, torch.device("cpu"))
    words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size"
    assert len(any_batches(tiny_config(f"{words} 200", 2), topology)) == 8
    assert len(any_batches(tiny_config(f"{words} 8", 2), topology)) == 4
    assert len(any_batches(tiny_config("--global-batch-size 2"), Topology(Layout(), 0, topology.device))) == 1
