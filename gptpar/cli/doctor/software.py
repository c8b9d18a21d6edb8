"""The doctor's checks of software: Python, torch, CUDA, NCCL, compilers, the C++ helpers."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gptpar.cli.doctor.finding import Finding, unless
from gptpar.errors import NativeBuildError
from gptpar.reporting.banner import format_bytes
from gptpar.system import native

MIN_TORCH = (2, 11)
MIN_PYTHON = (3, 11)


def software_findings() -> Iterator[Finding]:
    """One finding for each program and helper."""
    version = platform.python_version()
    yield Finding("Python", version, unless(sys.version_info >= MIN_PYTHON, "install Python 3.11 or newer."))
    yield _torch()
    yield _cuda()
    yield _nccl()
    yield _compiler()
    yield _nvcc()
    yield from map(_helper, ("cpu_adam", "data_index", "bpe", "crc32", "strided_copy"))


def _torch() -> Finding:
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    wanted = ".".join(map(str, MIN_TORCH))
    return Finding("torch", torch.__version__, unless(found >= MIN_TORCH, f"install torch {wanted} or newer."))


def _cuda() -> Finding:
    """The GPUs that torch sees. A machine without a GPU trains on its CPU, which is no reason to warn."""
    count = torch.cuda.device_count()
    if count:
        kinds = [torch.cuda.get_device_properties(number) for number in range(count)]
        names = ", ".join(dict.fromkeys(f"{kind.name} ({format_bytes(kind.total_memory)})" for kind in kinds))
        old = [kind.name for kind in kinds if (kind.major, kind.minor) < (7, 0)]
        advice = unless(
            not old, f"the compiler needs a GPU of compute capability 7.0 or more: add --no-compile ({old})."
        )
        return Finding("CUDA", f"{torch.version.cuda}, {count} x {names}", advice, count)
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        return Finding("CUDA", "no GPU: training runs on the CPU", value=0)
    if torch.version.cuda is None:
        return Finding("CUDA", "a GPU is there, and torch is built without CUDA", "install torch's build for CUDA.", 0)
    advice = "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this CUDA."
    return Finding("CUDA", f"{torch.version.cuda}, but torch sees no GPU", advice, 0)


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        gloo = dist.is_available() and dist.is_gloo_available()
        text = "gloo connects processes on CPUs" if gloo else "neither NCCL nor gloo"
        return Finding("NCCL", text, unless(gloo, "install a build of torch with torch.distributed."))
    if not dist.is_nccl_available():
        return Finding(
            "NCCL", "not in this torch", "install a build of torch with NCCL, or give --distributed-backend gloo."
        )
    return Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _compiler() -> Finding:
    """What builds the helpers, torch.compile's code and Triton's launchers."""
    try:
        command = native.find_compiler()
    except NativeBuildError as error:
        return Finding("C++ compiler", "none", str(error))
    return Finding("C++ compiler", next(iter(_output([*command, "--version"]).splitlines()), command[0]))


def _nvcc() -> Finding:
    """gptpar compiles nothing with nvcc; its version may explain errors of other packages."""
    path = shutil.which("nvcc")
    text = _output([path, "--version"]) if path else "none (not needed)"
    found = re.search(r"release [\d.]+", text)  # "Cuda compilation tools, release 12.8, V12.8.61"
    return Finding("nvcc", found[0] if found else next(iter(text.splitlines()), ""))


def _helper(name: str) -> Finding:
    begun = time.perf_counter()
    try:
        library = native.load(name)
    except NativeBuildError as error:
        sentence = " ".join(str(error).split())
        return Finding(f"csrc/{name}", "cannot be built: slower operators of torch or Python take its place", sentence)
    seconds = time.perf_counter() - begun
    origin = "from the package" if native.PREBUILT_DIR in Path(library._name).parents else "built on first use"
    return Finding(f"csrc/{name}", f"{origin}, loaded in {seconds:.1f} s")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout or done.stderr
