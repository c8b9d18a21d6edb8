"""The machine's facts in a result line of a benchmark: name, date, commit, and peak memory."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import torch

from gptpar.reporting.banner import in_gib
from gptpar.system import host


def about_machine(count: int) -> dict[str, str]:
    """The machine, the date and, in a checkout, the commit.

    Args:
        count: number of processes that measure.
    """
    cores = f"{len(host.cores())} cores"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    about = {
        "machine": f"{count} x {gpu}, {cores}" if gpu else f"{host.processor()}, {cores}",
        "date": datetime.date.today().isoformat(),
    }
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        commit = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if commit.returncode == 0:
            about["commit"] = commit.stdout.strip()
    return about


def peak_memory(on_gpu: bool) -> dict[str, float | None]:
    """The peak memory of this process in GiB: on the GPU by tensors and by the allocator, and on the host."""
    found = {
        "peak_mem_gib": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() if on_gpu else None,
        "peak_host_gib": host.peak_process_memory(),
    }
    return {name: None if size is None else in_gib(size, 2) for name, size in found.items()}
