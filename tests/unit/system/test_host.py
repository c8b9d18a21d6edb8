"""The machine's memory and cores."""

from pathlib import Path

import pytest
import torch

from gptpar.checkpoint.background import num_copiers
from gptpar.config.sections.precision import graph_obstacles, wants_graph
from gptpar.offload.buckets import buckets_of
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition
from gptpar.optim.schedule import make_schedule
from gptpar.run.auto_offload import any_batches, bytes_saved_without_host, smallest_ratio
from gptpar.run.trainer import Trainer
from gptpar.system import host, limits
from gptpar.system.limits import core_quota, memory_limit, total_memory
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config

GIB = 1 << 30


def files_of(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine with 8 GiB free and these files, whose kernel says that this process is in these control groups."""
    memory = "MemTotal:       9999999 kB\nMemAvailable:   8388608 kB\n"
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": memory, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(limit: object, used: int, inactive: int, folder: str = "sys/fs/cgroup") -> dict[str, str]:
    """The files of a control group's memory."""
    texts = {"max": f"{limit}\n", "current": f"{used}\n", "stat": f"anon 5\ninactive_file {inactive}\n"}
    return {f"{folder}/memory.{name}": text for name, text in texts.items()}


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert host.available_memory() > 1 << 28  # of this machine
    assert host.available_memory(tmp_path / "nothing") == 0
    root = files_of(tmp_path, "0::/\n", group(3000000, 2500000, 400000))
    assert host.available_memory(root) == 3000000 - 2500000 + 400000
    (root / "sys/fs/cgroup/memory.stat").unlink()
    assert host.available_memory(root) == 3000000 - 2500000
    files_of(root, "0::/\n", group("max", 2500000, 400000))
    assert host.available_memory(root) == 8 * GIB


def test_the_smallest_of_nested_limits_counts(tmp_path: Path) -> None:
    """Slurm limits the job, not the step in which the process is; without a namespace the path is the whole one."""
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    groups = group("max", GIB, 0, f"{job}/step_0/user/task_0") | group(6 * GIB, GIB, 0, f"{job}/step_0")
    groups |= group(4 * GIB, 2 * GIB, GIB, job)
    root = files_of(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", groups)
    assert host.available_memory(root) == 3 * GIB
    (root / job / "step_0/memory.high").write_text(f"{2 * GIB}\n")
    assert host.available_memory(root) == GIB
    (root / job / "step_0/memory.current").write_text(f"{5 * GIB}\n")
    assert host.available_memory(root) == 0


def test_the_narrowest_group_of_version_2_counts(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/memory.max": "5000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.high": "4000\n",
    }
    root = files_of(tmp_path, "0::/a/b\n", groups)
    assert (core_quota(root), memory_limit(root), total_memory(root)) == (1.5, 4000, 9999999 << 10)


def test_version_1(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7000",
    }
    root = files_of(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n", groups)
    assert (core_quota(root), memory_limit(root)) == (2.0, 7000)


def test_no_limit(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": str(2**63)}
    root, no = files_of(tmp_path, "0::/\n", groups), tmp_path / "no"
    assert (core_quota(root), memory_limit(root)) == (None, None)
    assert (core_quota(no), memory_limit(no), total_memory(no)) == (None, None, 0)


@pytest.mark.parametrize(
    ("mine", "quota", "count", "copiers"), [(40, None, 40, 8), (40, 10.0, 10, 5), (4, 2.5, 2, 2), (8, 0.5, 1, 2)]
)
def test_cores_are_those_that_the_process_may_use(
    mine: int, quota: float | None, count: int, copiers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "cores", lambda: list(range(mine)))
    monkeypatch.setattr(limits, "core_quota", lambda: quota)
    assert (limits.usable_cores(), num_copiers()) == (count, copiers)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, 3),
        ({"RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "5"}, 1),
        ({"RANK": "5", "SLURM_LOCALID": "1", "SLURM_PROCID": "5"}, 1),
        ({"RANK": "5", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}, None),  # a batch script started it, not srun
        ({"RANK": "5"}, None),
    ],
)
def test_the_place_on_the_machine(environment: dict[str, str], found: int | None) -> None:
    assert host.local_rank(environment) == found


def test_the_number_of_processes_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")  # of the job; this process is on its own
    assert host.place_on_machine() == (0, 1)
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert host.place_on_machine() == (2, 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert host.place_on_machine() == (1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host.place_on_machine() == (1, 2)


def test_the_smallest_ratio_that_fits() -> None:
    """In fp32 the parameters are the master weights where nothing is on the host, which needs less."""
    assert smallest_ratio(16 * 1000, [(1000, 16)]) == 0.0
    assert smallest_ratio(14 * 400, [(1000, 14)]) == 0.6
    assert smallest_ratio(14 * 400 - 1, [(1000, 14)]) == 0.601
    assert smallest_ratio(-5, [(1000, 16)]) == 1.0
    assert smallest_ratio(16 * 750, [(1000, 16)], saved=4 * 1000) == 0.0
    assert smallest_ratio(16 * 750 - 1, [(1000, 16)], saved=4 * 1000) == 0.251
    for flags, saved in (("", True), ("--bf16", False), ("--cpu-parameters", False)):
        trainer = make_trainer(tiny_config(f"--cpu-optimizer --cpu-optimizer-ratio 1 {flags}"))
        parameters = 4 * trainer.engine.table.length()
        assert bytes_saved_without_host(trainer) == (parameters if saved else 0)
        trainer.close()


def test_state_in_files_is_ordinary_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    partition = OffloadedPartition("unit", 1000, (GroupRange(0, 1000, 1),), ((0, 1000),))
    (bucket,) = buckets_of(partition, torch.zeros(1000), [CpuAdam(1)] * 2, torch.float32, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for buffer in bucket.buffers.all():
        assert buffer.shape == (1000,) and not buffer.any()
        buffer.fill_(2.5)
    assert bucket.buffers.weights.sum() == 2500


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


def test_a_trial_runs_the_passes_without_any_optimizer_state() -> None:
    config = tiny_config("--cpu-optimizer --bf16 --global-batch-size 8 --lr-warmup-iters 2 --lr-decay-style cosine")
    topology = Topology(Mesh(), 0, torch.device("cpu"))
    trainer = Trainer(config, topology, make_schedule(config, 0), tries_memory=True)
    trainer.initialise()
    loss = trainer.forward_backward(any_batches(config, topology), 0)
    assert loss.isfinite() and trainer.host is None
    optimizer = trainer.engine.optimizer
    assert optimizer.master.numel() == optimizer.grad.numel() == 0 and trainer.engine.table.ratio == 1
    trainer.close()
