"""Limits of control groups, in both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.checkpoint.background import num_copiers
from gptpar.system import limits
from gptpar.system.limits import core_quota, memory_limit, total_memory


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    """A file system with these files, and a process in a control group."""
    for name, text in {"proc/self/cgroup": group, "proc/meminfo": "MemTotal: 1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_narrowest_group_of_version_2_counts(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/memory.max": "5000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.high": "4000\n",
    }
    root = machine(tmp_path, "0::/a/b\n", groups)
    assert (core_quota(root), memory_limit(root), total_memory(root)) == (1.5, 4000, 1_024_000)


def test_no_limit(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": str(2**63)}
    root = machine(tmp_path, "0::/\n", groups)
    assert (core_quota(root), memory_limit(root)) == (None, None)
    assert (core_quota(tmp_path / "no"), memory_limit(tmp_path / "no"), total_memory(tmp_path / "no")) == (
        None,
        None,
        0,
    )


@pytest.mark.parametrize(
    ("mine", "quota", "count", "copiers"),
    [(40, None, 40, 8), (40, 10.0, 10, 5), (4, 2.5, 2, 2), (8, 0.5, 1, 2)],
)
def test_cores_are_those_that_the_process_may_use(
    mine: int, quota: float | None, count: int, copiers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "cores", lambda: list(range(mine)))
    monkeypatch.setattr(limits, "core_quota", lambda: quota)
    assert (limits.usable_cores(), num_copiers()) == (count, copiers)


def test_version_1(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7000",
    }
    root = machine(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n", groups)
    assert (core_quota(root), memory_limit(root)) == (2.0, 7000)
