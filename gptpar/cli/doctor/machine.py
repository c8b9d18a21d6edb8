"""The doctor's checks of the machine: cores, memory, limits, disk and bandwidths."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from gptpar.cli.doctor.finding import Finding, unless
from gptpar.errors import GptparError, first_line
from gptpar.reporting.banner import format_bytes
from gptpar.system import bandwidth
from gptpar.system.host import available_memory, cores, cpuinfo, processor
from gptpar.system.limits import core_quota, lockable_memory, memory_limit, total_memory

MIB, GIB = 2**20, 2**30
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve")
MIN_SHARED = GIB
"""NCCL and gloo connect the processes of a machine through /dev/shm; --max-restarts and --save-local may fill it."""
MIN_MEMORY, MIN_DISK = 4 * GIB, 20 * GIB
MIN_COPY, MIN_PCIE, MIN_PEER, MIN_DISK_RATE = 8e9, 10e9, 10e9, 100e6


def machine_findings(folder: Path) -> Iterator[Finding]:
    """Cores, memory, limits and disk.

    Args:
        folder: where runs are to be saved.
    """
    yield _processor()
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _locked_memory()
    yield _disk(folder)


def speed_findings(folder: Path, num_bytes: int) -> Iterator[Finding]:
    """Bandwidths of host memory, of the GPUs' links and of the disk.

    Args:
        folder: where runs are to be saved.
        num_bytes: of each copy.
    """
    rate = bandwidth.memory_copy(num_bytes)
    slow = "the CPU optimizer is bound by it: is the machine busy, or are the cores on one memory controller?"
    yield _rate("host memory", rate, "read and written", MIN_COPY, slow)
    if torch.cuda.is_available():
        yield from _gpu_speeds(num_bytes)
    try:
        rate = bandwidth.disk_write(num_bytes, folder)
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        yield Finding("disk write", text, "choose another folder for --save.")
        return
    slow = "a checkpoint has 12 to 16 bytes a parameter: choose a faster disk, or add --save-local on one."
    yield _rate("disk write", rate, f"written and synced in {folder}", MIN_DISK_RATE, slow)


def _gpu_speeds(num_bytes: int) -> Iterator[Finding]:
    device = torch.device("cuda", 0)
    try:
        to_device, to_host = bandwidth.host_to_device(num_bytes, device)
    except (GptparError, torch.OutOfMemoryError) as error:
        yield Finding("pinned memory", "cannot be had", first_line(error))
        return
    yield Finding("pinned memory", f"{format_bytes(num_bytes)} locked and released")
    slow = "offload is bound by it: is the GPU's link narrower than its slot (nvidia-smi -q -d PCIE), or in use?"
    yield _rate("host to GPU", to_device, "to GPU 0, pinned", MIN_PCIE, slow)
    yield _rate("GPU to host", to_host, "from GPU 0, pinned", MIN_PCIE, slow)
    if torch.cuda.device_count() > 1:
        rate = bandwidth.device_to_device(num_bytes, device, torch.device("cuda", 1))
        slow = "are the GPUs connected (nvidia-smi topo -m)? Prefer the pipeline and data axes to the tensor axis."
        yield _rate("GPU to GPU", rate, "from GPU 0 to GPU 1", MIN_PEER, slow)


def _rate(name: str, rate: float, what: str, least: float, slow: str) -> Finding:
    text = f"{rate / 1e9:.1f} GB/s {what}" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s {what}"
    return Finding(name, text, unless(rate >= least, slow), rate)


def _processor() -> Finding:
    """The vector instructions that speed up the CPU optimizer and bf16 on a CPU."""
    lines = [line for line in cpuinfo() if line.startswith(("flags", "Features"))]
    words = {word for line in lines for word in line.split(":")[1].split()}
    found = [name for name in FEATURES if name in words]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    advice = "without AVX2 the CPU optimizer is several times slower: is it hidden by a virtual machine's CPU model?"
    text = f"{processor()}; {', '.join(found) or 'no vector instructions that we know'}"
    return Finding("processor", text, unless("avx2" in words or not is_x86, advice))


def _cores() -> Finding:
    mine, quota, all_cores = len(cores()), core_quota(), os.cpu_count() or 1
    text = f"{mine} of {all_cores} cores"
    if quota is None:
        return Finding("cores", text, value=mine)
    advice = f"threads of {mine} cores share the time of {quota:g}: set OMP_NUM_THREADS, or raise the container's CPUs."
    return Finding(
        "cores", f"{text}; the control group grants the time of {quota:g}", unless(quota >= mine, advice), mine
    )


def _memory() -> Finding:
    free, total, limit = available_memory(), total_memory(), memory_limit()
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is not None:
        text += f"; the control group's limit is {format_bytes(limit)}"
    advice = "end other programs, or raise the container's memory limit."
    return Finding("memory", text, unless(free >= MIN_MEMORY, advice), free)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("/dev/shm", "not there", "" if platform.system() != "Linux" else "mount a tmpfs there.")
    usage = shutil.disk_usage(folder)
    advice = "processes of one machine meet there: docker run --shm-size=8g or --ipc=host; in Kubernetes a volume "
    advice += "emptyDir with medium Memory."
    text = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    return Finding("/dev/shm", text, unless(usage.free >= MIN_SHARED, advice), usage.free)


def _locked_memory() -> Finding:
    """The limit concerns InfiniBand's libraries; CUDA locks memory regardless of it."""
    limit = lockable_memory()
    if limit is None:
        return Finding("locked memory", "without a limit")
    text = f"at most {format_bytes(limit)} (ulimit -l)"
    matters = torch.cuda.is_available() and Path("/dev/infiniband").is_dir()
    advice = "NCCL over InfiniBand needs ulimit -l unlimited: set it in the container or in limits.conf."
    return Finding("locked memory", text, unless(not matters, advice), limit)


def _disk(folder: Path) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        text = f"{folder}: {error.strerror or error}"
        return Finding("disk", text, "create the folder, or name another with --folder.")
    text = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {folder}"
    advice = "a checkpoint has 12 to 16 bytes a parameter: make room, or set --keep-checkpoints."
    return Finding("disk", text, unless(usage.free >= MIN_DISK, advice), usage.free)
