"""Trains the small GPT in every mode and prints memory and speed of each, beside what the estimators say.

python examples/gpt_lite/compare.py --text my.txt [--nproc 2] [--size small] [--steps 30]

Memory is the largest process's: the GPU's without activations as estimated, and its peak as measured. All modes train
on the same samples from the same initial values. So their losses are the same but for roundings: the last column has
the largest relative difference to the first mode.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from model import SIZES, Gpt
from train import MODES, config_of

import gptpar
from gptpar.plan.deepspeed_estimates import zero2, zero3

TRAIN = Path(__file__).with_name("train.py")
TIMEOUT_SECONDS = 1800


def run(mode: str, nproc: int, words: list[str]) -> dict[str, Any]:
    """What one mode measured, in processes of its own.

    Raises:
        SystemExit: it failed; with its output.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [*torchrun, str(TRAIN), "--mode", mode, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def estimates(mode: str, size: str, nproc: int) -> tuple[str, str]:
    """(ours, DeepSpeed's) bytes of a GPU without activations; a pipeline and a lower stage have none."""
    if mode == "pipeline":
        return "-", "-"
    model = Gpt(SIZES[size])
    ours = gptpar.estimate_memory(model, config_of(mode, nproc), nproc).device
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
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    args = parser.parse_args()
    titles = ("mode", "estimate", "DeepSpeed's", "GPU peak", "host peak", "tokens/s", "last loss", "difference")
    print("MiB of one process, GPU without activations in the estimates:")
    print(("{:10}" + "{:>13}" * 7).format(*titles))
    first = None
    for mode in args.modes:
        found = run(mode, args.nproc, ["--text", args.text, "--size", args.size, "--steps", args.steps])
        first = first or found["losses"]
        difference = max(abs(a - b) / b for a, b in zip(found["losses"], first, strict=True))
        row = (
            mode,
            *estimates(mode, args.size, args.nproc),
            mib(found["gpu_bytes"]),
            mib(found["host_bytes"]),
            f"{found['tokens_per_s']:,.0f}",
            f"{found['losses'][-1]:.4f}",
            f"{difference:.1e}",
        )
        print(("{:10}" + "{:>13}" * 7).format(*row), flush=True)


if __name__ == "__main__":
    main()
