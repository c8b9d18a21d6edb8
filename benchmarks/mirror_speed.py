"""Time the copies that machines in a ring keep for each other: two processes on this machine, over loopback.

    python -m benchmarks.mirror_speed [--gigabytes 1] [--rounds 5] [--record]

Prints one JSON object; ``--record`` adds it to ``benchmarks/mirror_speed.jsonl``. Each process sends a file in memory
to the other one and receives the other's file, as two machines do after a copy. Speeds are of one direction: bytes of
one file / seconds until both have arrived, of the median round and of the best one.

- ``files``: what a run does: blocks are read from the file, sent through gloo, and written to a file.
- ``messages``: the same blocks through gloo alone, without files: what the sockets reach.
- ``copies``: the same blocks read from the one file and written to the other one, without sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.about import about
from gptpar.checkpoint.manifest import file_of
from gptpar.checkpoint.moving import BLOCK_BYTES, move_files
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.ring import Ring

RECORD = Path(__file__).with_suffix(".jsonl")


def messages(num_bytes: int, other: int) -> None:
    """Send and receive blocks that stay in two buffers."""
    mine, theirs = (torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(2))
    for _ in range(0, num_bytes, BLOCK_BYTES):
        for request in (dist.isend(mine, other), dist.irecv(theirs, other)):
            assert request is not None
            request.wait()


def copies(source: Path, target: Path) -> None:
    """Copy a file in blocks."""
    block = bytearray(BLOCK_BYTES)
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while count := reading.readinto(block):
            writing.write(memoryview(block)[:count])
    target.unlink()


def measure(rank: int, port: int, num_bytes: int, rounds: int, folder: Path) -> None:
    """One of the two processes; the first one leaves ``speeds.json`` in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = folder / str(rank)
    own.mkdir()
    piece = os.urandom(1 << 20)
    with (own / file_of(rank)).open("wb") as file:
        for _ in range(num_bytes >> 20):
            file.write(piece)
    ranks, moves = Ranks(None), Ring(((0,), (1,))).copies([num_bytes, num_bytes])
    ways: dict[str, Callable[[], None]] = {
        "files": lambda: move_files(ranks, moves, own),
        "messages": lambda: messages(num_bytes, 1 - rank),
        "copies": lambda: copies(own / file_of(rank), own / "copy"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            (own / file_of(1 - rank)).unlink(missing_ok=True)
            dist.barrier()
            began = time.perf_counter()
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    speeds = {
        f"{name}_{which}_GB_s": round(num_bytes / taken(times[1:]) / 1e9, 3)
        for name, times in seconds.items()
        for which, taken in (("median", statistics.median), ("best", min))
    }
    if rank == 0:
        (folder / "speeds.json").write_text(json.dumps(speeds))
    dist.destroy_process_group()


def main() -> None:
    """Start both processes and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each process's file (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count (default: 5)")
    parser.add_argument("--record", action="store_true", help=f"add the line to {RECORD.name}")
    args = parser.parse_args()
    num_bytes = int(args.gigabytes * 1e9) >> 20 << 20
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="gptpar-mirror-speed-", dir="/dev/shm"))
    try:
        mp.start_processes(measure, (port, num_bytes, args.rounds, folder), nprocs=2, start_method="spawn")
        speeds = json.loads((folder / "speeds.json").read_text())
    finally:
        shutil.rmtree(folder)
    line = {**speeds, "gigabytes": args.gigabytes, "rounds": args.rounds, **about("torch")}
    print(json.dumps(line))
    if args.record:
        with RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
