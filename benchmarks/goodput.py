"""Goodput of a tiny run of two processes whose workers are killed: useful step time over wall time.

    python -m benchmarks.goodput --minutes 10 --kill-every 30 --seed 1

The seed chooses each worker that is killed and the time until then: 0.5 to 1.5 times the interval. Useful is the time
of the steps in the finished run's metrics.jsonl, each counted once. Lost is the time of steps that are trained again,
of saves, copies in memory and restarts. The clock starts with the first step, because a run of days starts up only
once. Prints one JSON line, and appends it to a file with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import about
from gptpar.system.processes import children

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 4 --lr 1e-3 "
    "--mock-data --vocab-size 60 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --lr-decay-style constant "
    "--train-iters 10000000 --log-interval 1 --nproc-per-node 2 --max-restarts 1000000 --hang-seconds 30"
)
STEP = re.compile(r"iteration +(\d+)/")


def worker_of(launcher: int, rank: int) -> int | None:
    """The process id of a worker that was forked by a launcher's template; ``None`` while it is being started."""
    for process in children(launcher):
        try:
            if Path(f"/proc/{process}/comm").read_text().strip() == f"gptpar rank {rank}":
                return process
        except OSError:
            continue
    return None


def measure(seconds: float, every: float, seed: int, interval: int, save_interval: int) -> dict[str, float]:
    """Train, and kill one of the two workers again and again.

    Args:
        seconds: length of the measurement, from the first step on.
        every: mean seconds between two kills.
        seed: of the killed ranks and of the times between kills.
        interval: steps between copies in memory.
        save_interval: steps between checkpoints.

    Returns:
        The fields of the JSON line.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{MODEL} --mirror-interval {interval} --save {folder} --save-interval {save_interval}"
        launcher = subprocess.Popen(
            [sys.executable, "-m", "gptpar", "pretrain", *flags.split(), "--keep-checkpoints", "2"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert launcher.stdout is not None
        recoveries, began, killed, due = [], 0.0, 0.0, 0.0
        for line in launcher.stdout:
            now = time.monotonic()
            if STEP.search(line):
                began = began or now
                due = due or now + every * chance.uniform(0.5, 1.5)
                if killed and now > killed + 0.2:
                    recoveries.append(now - killed)
                    killed = 0.0
                if now > began + seconds:
                    break
                if not killed and now > due and (worker := worker_of(launcher.pid, chance.randrange(2))):
                    os.kill(worker, signal.SIGKILL)
                    killed, due = time.monotonic(), now + every * chance.uniform(0.5, 1.5)
        wall = time.monotonic() - began
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(line["iteration_time_ms"] for line in lines) / 1e3
    useful = sum(_useful_seconds(line, before, step) for before, line in zip([None, *lines], lines, strict=False))
    return {
        "goodput": round(useful / wall, 4),
        "wall_s": round(wall, 1),
        "kills": len(recoveries),
        "kill_every_s": every,
        "steps": len(lines),
        "step_ms": round(step * 1e3, 2),
        "kill_to_next_step_median_s": round(statistics.median(recoveries), 2) if recoveries else 0.0,
        "kill_to_next_step_max_s": round(max(recoveries), 2) if recoveries else 0.0,
        "mirror_interval": interval,
        "seed": seed,
    }


def _useful_seconds(line: dict[str, Any], before: dict[str, Any] | None, median: float) -> float:
    """The time of a step; of the first step of new workers, which warms up, the median step's time counts."""
    first = before is None or before.get("restarts", 0) != line.get("restarts", 0)
    return median if first else line["iteration_time_ms"] / 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the measurement (default: 10)")
    parser.add_argument(
        "--kill-every", type=float, default=30.0, metavar="S", help="mean seconds to a kill (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the killed ranks and the times (default: 1)")
    parser.add_argument("--mirror-interval", type=int, default=50, help="steps between copies in memory (default: 50)")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between checkpoints (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the line to this file")
    args = parser.parse_args(argv)
    found = measure(60 * args.minutes, args.kill_every, args.seed, args.mirror_interval, args.save_interval)
    line = json.dumps({**found, **about("torch")})
    print(line)
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
