"""Hashes of the whole state after 20 steps in a dozen configurations: did a change move a bit?

    python -m tests.golden --write before.json       in the checkout before a change
    python -m tests.golden --against before.json     in the one after it

A change that only moves code leaves every hash as it is. Hashes hold for one machine and one torch alone, because
matrix products round differently elsewhere; so none are kept in the repository, and this is no test. On a machine with
GPUs the cases of one process run on the first of them.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptpar.checkpoint import latest, read_tensors
from gptpar.system.limits import usable_cores

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 60 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-2 --lr-warmup-iters 3 --weight-decay 0.1 "
    "--clip-grad 0.9 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 20"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
OFFLOAD = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio"
CASES: dict[str, tuple[int, str]] = {
    "fp64": (1, "--fp64"),
    "fp32, dropout": (1, "--hidden-dropout 0.1"),
    "bf16": (1, "--bf16"),
    "fp16": (1, "--fp16 --initial-loss-scale 65536"),
    "bf16, Llama": (1, f"--bf16 {LLAMA}"),
    "bf16, all on the CPU": (1, f"--bf16 {OFFLOAD} 1"),
    "bf16, all on the CPU, one addend": (1, f"--bf16 --micro-batch-size 8 {OFFLOAD} 1"),
    "fp64, CPU 0.6, parameters on the CPU": (1, f"--fp64 {OFFLOAD} 0.6 --cpu-parameters"),
    "bf16, recomputed": (1, "--bf16 --recompute-granularity full"),
    "fp64, ZeRO-1": (2, "--fp64 --zero-stage 1"),
    "bf16, ZeRO-3, CPU 0.3": (2, f"--bf16 --zero-stage 3 {OFFLOAD} 0.3"),
    "fp64, tensor and sequence": (2, "--fp64 --tensor-model-parallel-size 2 --sequence-parallel"),
    "bf16, interleaved": (2, "--bf16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "bf16, tensor x pipeline, Llama": (
        4,
        f"--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {LLAMA}",
    ),
}


def hash_of_run(name: str) -> str:
    """Train a case with this checkout and hash its checkpoint.

    Raises:
        RuntimeError: with the run's output, where it failed.
    """
    processes, flags = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        words = f"{MODEL} {flags} --nproc-per-node {processes} --save {folder}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if processes > 1:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "gptpar", "pretrain", *words.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        saved = latest(folder)
        if done.returncode or saved is None:
            raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
        state = hashlib.sha256()
        for tensor_name, tensor in sorted(read_tensors(saved).items()):
            state.update(tensor_name.encode() + tensor.contiguous().numpy().tobytes())
        return state.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a case; returns 1 where a hash differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="keep the hashes")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare them with kept ones")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose name contains this")
    args = parser.parse_args(argv)
    names = [name for name in CASES if args.only in name]
    with ThreadPoolExecutor(max(1, usable_cores() // 2)) as pool:
        found = dict(zip(names, pool.map(hash_of_run, names), strict=True))
    if args.write:
        args.write.write_text(json.dumps(found, indent=2) + "\n")
    before = found if args.write else json.loads(args.against.read_text())
    for name, value in found.items():
        print(f"{name:40} {value[:16]} {'' if before.get(name) == value else 'DIFFERS'}")
    return int(any(before.get(name) != value for name, value in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
