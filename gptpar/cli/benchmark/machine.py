"""What a result line says of where it comes from."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import torch

from gptpar.system import host


def about_machine(count: int) -> dict[str, str]:
    """The machine, the date and, in a checkout, the commit.

    Args:
        count: processes that measure.
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
