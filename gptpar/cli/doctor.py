"""``gptpar doctor``: whether this machine is ready to train, and how fast it moves bytes."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gptpar.cli.flags import parser_of
from gptpar.errors import GptparError, NativeBuildError, first_line, printable
from gptpar.reporting.banner import format_bytes
from gptpar.system import bandwidth, native
from gptpar.system.host import available_memory, cores, cpuinfo, processor
from gptpar.system.limits import core_quota, lockable_memory, memory_limit, total_memory

WIDTH = 100


def main(argv: list[str]) -> int:
    """Print what was found; returns 1 if any line warns, else 0."""
    options = parser_of("doctor").parse_args(argv)
    findings = [*software_findings(), *machine_findings(options.folder)]
    findings += speed_findings(options.folder, options.mib * MIB)
    if options.json:
        print(json.dumps(as_json(findings)))
    else:
        print("\n".join(lines(findings)))
    return int(not all(finding.is_ok for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings by name, and whether all of them are ok."""
    found = {
        one.name: {"ok": one.is_ok, "text": one.text, "advice": one.advice, "value": one.value} for one in findings
    }
    return {"ok": all(one.is_ok for one in findings), "findings": found}


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding, its advice below it, and the number of warnings at the end."""
    width = max(len(one.name) for one in findings)
    for one in findings:
        state = "ok  " if one.is_ok else "warn"
        yield printable(f"{state}  {one.name:<{width}}  {one.text}"[:WIDTH])
        indent = " " * (width + 8)
        yield from textwrap.wrap(printable(one.advice), WIDTH, initial_indent=indent, subsequent_indent=indent)
    warnings = sum(not one.is_ok for one in findings)
    yield f"{warnings} of {len(findings)} lines warn" if warnings else f"all {len(findings)} lines are ok"


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
    """The limit of locked memory, for InfiniBand's libraries; CUDA locks memory regardless of it."""
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


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the thing that was checked.
        text: what was found, with numbers.
        advice: what to do; empty if all is good.
        value: the number in the text, in bytes, bytes a second or the text's unit; ``None`` if there is none.
    """

    name: str
    text: str
    advice: str = ""
    value: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice


def unless(good: bool, advice: str) -> str:
    """The advice, or an empty text if all is good."""
    return "" if good else advice


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
    """The C++ compiler, which builds the helpers, torch.compile's code and Triton's launchers."""
    try:
        command = native.find_compiler()
    except NativeBuildError as error:
        return Finding("C++ compiler", "none", str(error))
    return Finding("C++ compiler", next(iter(_output([*command, "--version"]).splitlines()), command[0]))


def _nvcc() -> Finding:
    """The version of nvcc, which may explain errors of other packages; gptpar compiles nothing with it."""
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
