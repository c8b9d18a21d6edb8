"""Trains the small GPT in every mode and prints memory and speed of each, beside what the estimators say.

python examples/gpt_lite/compare.py --text my.txt [--nproc 2] [--size small] [--steps 30] [--fp32]
python examples/gpt_lite/compare.py --text my.txt --nproc 1 --size medium --fp32 --gpu-memory-gib 5

Memory is the largest process's: the GPU's without activations as estimated, and its peak as measured. All modes train
on the same samples from the same initial values. So their losses are the same but for roundings: the last column has
the largest relative difference to the first mode, which is plain PyTorch in one process and fp32. With a limit of the
GPU's memory, the first row has all of it; those after it, plain PyTorch again among them, have the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from model import SIZES, Gpt
from train import MODES, PLAIN, config_of

import gptpar
from gptpar.plan.deepspeed_estimates import zero2, zero3

TRAIN = Path(__file__).with_name("train.py")
TIMEOUT_SECONDS = 1800


def run(mode: str, nproc: int, words: list[str]) -> dict[str, Any]:
    """What one mode measured, in processes of its own.

    Raises:
        SystemExit: it failed otherwise than by the memory of its GPU; with its output.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] * (nproc > 1)
    command = [sys.executable, *torchrun, str(TRAIN), "--mode", mode, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    found = json.loads(last) if last.startswith("{") else {}
    if done.returncode and not found.get("out_of_memory"):
        raise SystemExit(f"{mode} failed:\n{done.stdout}{done.stderr}")
    return found


def estimates(mode: str, size: str, nproc: int, *, fp32: bool) -> tuple[str, str]:
    """(ours, DeepSpeed's) bytes of a GPU without activations; plain PyTorch, a pipeline and a lower stage have none."""
    if mode in (PLAIN, "pipeline"):
        return "-", "-"
    model = Gpt(SIZES[size])
    ours = gptpar.estimate_memory(model, config_of(mode, nproc, fp32=fp32), nproc).device
    parameters = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    theirs = {
        "zero2": [row.gpu for row in zero2(parameters, 1, nproc) if "=none" in row.options],
        "zero3": [row.gpu for row in zero3(parameters, largest, 1, nproc) if "optimizer=none" in row.options],
        "offload": [row.gpu for row in zero3(parameters, largest, 1, nproc) if "param=cpu" in row.options],
    }.get(mode)
    return mib(ours), mib(theirs[0]) if theirs else "-"


def mib(count: int | None) -> str:
    """Of bytes."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="FILE")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", default="30")
    parser.add_argument("--nproc", type=int, default=2, help="processes; the pipeline needs an even number")
    parser.add_argument("--modes", nargs="+", choices=(PLAIN, *MODES), default=[PLAIN, *MODES], help="default: all")
    parser.add_argument("--fp32", action="store_true", help="on a GPU, too, where all modes but plain compute in bf16")
    parser.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="no more of a GPU's memory than this")
    args = parser.parse_args()
    titles = ("mode", "estimate", "DeepSpeed's", "GPU peak", "host peak", "tokens/s", "last loss", "difference")
    print("MiB of one process, GPU without activations in the estimates:")
    print(("{:10}" + "{:>13}" * 7).format(*titles))
    words = ["--text", args.text, "--size", args.size, "--steps", args.steps, *["--fp32"] * args.fp32]
    limit = [] if args.gpu_memory_gib is None else ["--gpu-memory-gib", str(args.gpu_memory_gib)]
    runs = [(mode, limit) for mode in args.modes]
    if limit:
        runs.insert(0, (args.modes[0], []))
    first = None
    for mode, limited in runs:
        found = run(mode, 1 if mode == PLAIN else args.nproc, [*words, *limited])
        first = first or found["losses"]
        memory = (
            *estimates(mode, args.size, args.nproc, fp32=args.fp32),
            mib(found["gpu_bytes"]),
            mib(found["host_bytes"]),
        )
        print(("{:10}" + "{:>13}" * 4).format(mode, *memory) + results(found, first), flush=True)


def results(found: dict[str, Any], first: list[float]) -> str:
    """The last columns of a row."""
    losses = found["losses"]
    if found["out_of_memory"]:
        return f"   out of memory after {len(losses)} steps"
    difference = max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
    return f"{found['tokens_per_s']:>13,.0f}{losses[-1]:>13.4f}{difference:>13.1e}"


if __name__ == "__main__":
    main()
