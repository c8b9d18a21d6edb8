"""What every line of a benchmark tells beside its figures."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from gptpar.system.host import processor


def about(*packages: str) -> dict[str, object]:
    """Machine, versions (of Python and of those packages that are installed), commit and date."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    here = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return {
        "machine": processor(),
        "cores": len(os.sched_getaffinity(0)),
        **versions,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
