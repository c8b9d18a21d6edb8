"""Runs a program of this folder in plain PyTorch and with gptpar, and compares losses, memory and speed.

python examples/deepspeed/compare.py --gpu-memory-gib 4 cifar.py
python examples/deepspeed/compare.py --nproc 2 gpt_lite.py --fp32 --pipeline

With a limit of the GPU's memory, plain PyTorch runs twice: with all of it, and with the memory allowed. Without a GPU
there is no memory to limit. The exit code is 0 if the run with gptpar had plain PyTorch's losses.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

TOLERANCE = 1e-4
"""Largest difference of a loss, by the first loss: fp32 sums in another order, over the default's 20 steps."""
OUT_OF_MEMORY = 3


class Found(NamedTuple):
    """What a run printed."""

    losses: list[float]
    peak_gib: float
    steps_per_s: float


def run(words: list[str], nproc: int, gib: float) -> Found:
    """Run this program's inner half in processes of their own.

    Args:
        words: a program and its flags.
        gib: of the GPU's memory; 0: all.

    Raises:
        SystemExit: it failed otherwise than by the GPU's memory; with its output.
    """
    launch = [sys.executable, "-m", "gptpar", "launch", "--standalone", "--nproc-per-node", str(nproc)]
    command = [*launch, __file__, "--inside", str(gib), *words]
    lines: list[str] = []
    losses: list[float] = []
    times: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for text in process.stdout or ():
            lines.append(text)
            if step := re.match(r"step \d+: loss (\S+)$", text):
                losses.append(float(step[1]))
                times.append(time.perf_counter())
    output = "".join(lines)
    if process.returncode and "out of memory: " not in output:
        raise SystemExit(f"{' '.join(words)} failed:\n{output}")
    peaks = [float(found) for found in re.findall(r"GPU peak (\S+) GiB", output)]
    return Found(losses, max(peaks, default=0), (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0)


def inside(gib: float, words: list[str]) -> None:
    """Run a program in this process."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False  # to compare two engines
        if gib:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / whole))
    program = Path(__file__).with_name(words[0])
    sys.argv = [str(program), *words[1:]]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except torch.OutOfMemoryError as error:
        print(f"out of memory: {str(error).splitlines()[0]}", flush=True)
        sys.exit(OUT_OF_MEMORY)
    finally:
        if cuda:
            print(f"GPU peak {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB", flush=True)


def line(name: str, found: Found, steps: int) -> str:
    """A row of the report."""
    peak = f"{found.peak_gib:.2f} GiB" if found.peak_gib else "-"
    if len(found.losses) < steps:
        return f"{name:24}{peak:>12}   out of memory after {len(found.losses)} steps"
    return (
        f"{name:24}{peak:>12}   loss {found.losses[0]:.4f} -> {found.losses[-1]:.4f}, {found.steps_per_s:.2f} steps/s"
    )


def main() -> int:
    """The exit code: 0 if the run with gptpar had plain PyTorch's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory-gib", type=float, default=0, metavar="GIB", help="default: all of it")
    parser.add_argument("--nproc", type=int, default=1, help="processes; plain PyTorch has one beside a pipeline")
    parser.add_argument("--inside", type=float, metavar="GIB", help=argparse.SUPPRESS)
    parser.add_argument("program", choices=("cifar.py", "gpt_lite.py", "train.py"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the program")
    args = parser.parse_args()
    words, limit = [args.program, *args.flags], args.gpu_memory_gib if torch.cuda.is_available() else 0
    if args.inside is not None:
        inside(args.inside, words)
        return 0
    plain_nproc = 1 if "--pipeline" in words else args.nproc
    plain = run([*words, "--plain"], plain_nproc, 0)
    steps = len(plain.losses)
    print(f"{'':24}{'GPU peak':>12}\n{line('plain PyTorch', plain, steps)}", flush=True)
    allowed = f", {limit:g} GiB" if limit else ""
    if limit:
        print(line(f"plain PyTorch{allowed}", run([*words, "--plain"], plain_nproc, limit), steps), flush=True)
    found = run(words, args.nproc, limit)
    print(line(f"gptpar{allowed}", found, steps))
    if len(found.losses) < steps:
        return 1
    pairs = zip(found.losses, plain.losses, strict=True)
    difference = max(abs(mine - theirs) for mine, theirs in pairs) / plain.losses[0]
    print(f"\nlargest difference of a loss, by the first loss: {difference:.1e} (allowed {TOLERANCE:g})")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
