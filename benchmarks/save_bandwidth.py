"""Time saves beside plain writes of as many bytes: saves alone, and saves during steps that overwrite the saved state.

    PYTHONPATH=. python benchmarks/save_bandwidth.py --folder /disk/new [--gigabytes 4.2] [--device cuda] [--rounds 3]

Prints one JSON object a line. All contenders run in turns, each round in another order, because disks are shared.

- ``plain``: one file, written in pieces of 8 MiB and flushed: through the system's cache by one thread and by four
  threads, and past the cache.
- ``save``: ``save_checkpoint`` while nothing else happens.
- ``behind``: ``save_checkpoint`` in a thread while steps go on. ``stall_s`` is the time that the steps took beyond as
  many steps without a save. ``room`` says which memory may hold copies: ``device`` (a clone on the GPU), ``host``
  (copies in host memory), ``none`` (steps wait for the save).

A step pauses for half of ``--step-ms``, overwrites the whole state, and pauses for a quarter of ``--step-ms``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.checkpoint.background import SaveUnderWay
from gptpar.system.host import peak_process_memory, process_memory
from gptpar.system.regions import PIECE_BYTES
from gptpar.system.snapshot import Snapshot
from gptpar.system.state_guard import StateGuard
from gptpar.topology.tensor_parts import TensorParts, as_parts, tensors_of

ELEMENTS = 16 << 20
"""Elements of one parameter; master weights and two moments have as many each."""


def plain_writes(folder: Path, num_bytes: int, threads: int, direct: bool) -> dict[str, Any]:
    """Write and flush one file."""
    memory = mmap.mmap(-1, PIECE_BYTES)
    memory.write(os.urandom(1 << 20) * (PIECE_BYTES >> 20))
    data, path = memoryview(memory), folder / "plain.bin"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    started = time.perf_counter()
    fd = os.open(path, flags)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda place: os.pwrite(fd, data, place), range(0, num_bytes, PIECE_BYTES)))
    os.fsync(fd)
    seconds = time.perf_counter() - started
    os.close(fd)
    path.unlink()
    return {"seconds": seconds}


class State:
    """The state that a step overwrites: three flat vectors on a device; parameters are views of them."""

    def __init__(self, num_bytes: int, device: torch.device, step_s: float):
        self.device, self.step_s, self.guard = device, step_s, StateGuard()
        count = max(1, num_bytes // (12 * ELEMENTS))
        self.vectors = [torch.randn(count * ELEMENTS, device=device) for _ in range(3)]
        self.num_bytes = sum(vector.nbytes for vector in self.vectors)

    def tensors(self) -> dict[str, TensorParts]:
        """The state by names, as ``save_checkpoint`` takes it."""
        splits = [vector.split(ELEMENTS) for vector in self.vectors]
        return {
            f"{kind}/{number}": as_parts(part)
            for number, parts in enumerate(zip(*splits, strict=True))
            for kind, part in zip(("weights", "exp_avg", "exp_avg_sq"), parts, strict=True)
        }

    def step(self) -> None:
        """Pause for half a step's time, update the whole state bucket by bucket, and pause for a quarter."""
        time.sleep(self.step_s / 2)
        for parts in zip(*(vector.split(ELEMENTS // 2) for vector in self.vectors), strict=True):
            self.guard.before_write(parts)
            for part in parts:
                part.mul_(0.999)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        time.sleep(self.step_s / 4)


def save(folder: Path, state: State) -> dict[str, Any]:
    """A save while nothing else happens."""
    started = time.perf_counter()
    path = save_checkpoint(folder / "save", 1, state.tensors(), {})
    seconds = time.perf_counter() - started
    shutil.rmtree(path.parent)
    return {"seconds": seconds}


def behind(folder: Path, state: State, room: str) -> dict[str, Any]:
    """A save during steps, and then as many steps without a save."""
    before = process_memory() or 0
    with suppress(OSError):  # Linux: the peak counts from now on
        Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    tensors = state.tensors()
    parts, num_bytes = tensors_of(tensors.values()), state.num_bytes if room == "host" else 0
    snapshot = Snapshot(parts, num_bytes, clones=lambda part: room == "device")
    under_way = SaveUnderWay(
        1,
        snapshot,
        lambda moved: save_checkpoint(folder / "save", 1, tensors, {}, snapshot=snapshot, moved=moved),
        state.guard,
    )
    begun, steps = time.perf_counter() - started, 0
    while not under_way.over:
        state.step()
        steps += 1
    with_save = time.perf_counter() - started
    under_way.end()
    shutil.rmtree(under_way.path.parent)
    started = time.perf_counter()
    for _ in range(steps):
        state.step()
    without = time.perf_counter() - started
    return {
        "seconds": under_way.seconds,
        "stall_s": with_save - without,
        "begin_s": begun,
        "waited_s": snapshot.waited_s,
        "steps": steps,
        "copied_bytes": snapshot.most_kept,
        "more_memory_bytes": max(0, (peak_process_memory() or 0) - before),
    }


def contenders(folder: Path, state: State) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, threads, direct in (("cache, 1 thread", 1, False), ("cache, 4 threads", 4, False), ("direct", 1, True)):
        if not direct or hasattr(os, "O_DIRECT"):
            yield (
                {"what": "plain", "how": name},
                lambda t=threads, d=direct: plain_writes(folder, state.num_bytes, t, d),  # type: ignore[misc]
            )
    yield {"what": "save"}, lambda: save(folder, state)
    for room in ("device", "host", "none") if state.device.type == "cuda" else ("host", "none"):
        yield {"what": "behind", "room": room}, lambda room=room: behind(folder, state, room)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=4.2, help="size of the state (default: 4.2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where the state lies")
    parser.add_argument("--step-ms", type=float, default=200.0, help="a step pauses for 3/4 of this (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    state = State(int(args.gigabytes * 1e9), torch.device(args.device), args.step_ms / 1e3)
    state.step()
    found = list(contenders(args.folder, state))
    measured: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(found))}
    for _ in range(args.rounds):
        for number in random.sample(range(len(found)), len(found)):
            measured[number].append(found[number][1]())
    best = 0.0
    for number, results in measured.items():
        medians = {key: statistics.median(one[key] for one in results) for key in results[0]}
        speed = state.num_bytes / 1e9 / medians["seconds"]
        if found[number][0]["what"] == "plain":
            best = max(best, speed)
        line = {**found[number][0], "device": args.device, "gigabytes": round(state.num_bytes / 1e9, 3)}
        line |= {"gb_per_s": round(speed, 3), "of_best_plain": round(speed / best, 3) if best else None}
        print(json.dumps({**line, **{key: round(value, 4) for key, value in medians.items()}}), flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
