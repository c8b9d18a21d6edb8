"""Shows that a CNN too large for the GPU memory allowed trains with offload, with plain PyTorch's losses.

python examples/cifar_offload/compare.py [--gpu-memory-gib 4] [--data cifar-10-batches-bin] [flags of train.py]

Three runs of train.py: plain PyTorch with all of the GPU's memory, plain PyTorch with the memory allowed, and gptpar
with the memory allowed. Without a GPU there is no memory to limit: the second run is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from train import OUT_OF_MEMORY, add_run_flags

TRAIN = Path(__file__).with_name("train.py")
TOLERANCE = 1e-4
"""Largest difference of a loss, by the first loss: fp32 sums in another order, over the default's 20 steps."""


def run(words: list[str]) -> dict[str, Any]:
    """What train.py measured.

    Raises:
        SystemExit: it failed otherwise than by the GPU's memory; with its output.
    """
    done = subprocess.run([sys.executable, str(TRAIN), *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, OUT_OF_MEMORY):
        raise SystemExit(f"train.py {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, found: dict[str, Any]) -> str:
    """A line of the report."""
    allowed = "all" if found["allowed_gib"] is None else f"{found['allowed_gib']:g} GiB"
    peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f} GiB"
    losses = found["losses"]
    if found["out_of_memory"]:
        return f"{name:24}{allowed:>10}{peak:>12}   out of memory after {len(losses)} steps"
    rate = len(losses) / found["seconds"]
    return f"{name:24}{allowed:>10}{peak:>12}   loss {losses[0]:.4f} -> {losses[-1]:.4f}, {rate:.2f} steps/s"


def main() -> int:
    """The exit code: 0 if the run with offload trained, with plain PyTorch's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory-gib", type=float, default=4.0, metavar="GIB", help="default: %(default)s")
    add_run_flags(parser)
    flags = vars(parser.parse_args())
    limit = [f"--gpu-memory-gib={flags.pop('gpu_memory_gib')}"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    reference = run(["--engine", "plain", *words])
    gib = reference["state_bytes"] / 2**30
    print(f"{reference['parameters']:,} parameters: {gib:.2f} GiB of weights, gradients and moments in fp32\n")
    print(f"{'':24}{'allowed':>10}{'GPU peak':>12}\n{line('plain PyTorch', reference)}")
    if torch.cuda.is_available():
        print(line("plain PyTorch", run(["--engine", "plain", *limit, *words])))
    else:
        print("no GPU is here, so no memory is limited: the run that would be out of memory is left out")
    found = run(["--engine", "gptpar", *limit, *words])
    print(line("gptpar, all on the host", found))
    if found["out_of_memory"]:
        return 1
    pairs = zip(found["losses"], reference["losses"], strict=True)
    difference = max(abs(mine - theirs) for mine, theirs in pairs) / reference["losses"][0]
    print(f"\nlargest difference of a loss, by the first loss: {difference:.1e} (allowed {TOLERANCE:g})")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
