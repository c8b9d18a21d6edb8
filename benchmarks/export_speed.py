"""Times a conversion to Hugging Face, and back, beside plain writes of as many bytes on the same disk.

    PYTHONPATH=. python benchmarks/export_speed.py --folder /disk/new [--gigabytes 1.5] [--rounds 3] [--dtype fp32]

Prints one JSON object a line. All contenders run in turns, each round in another order, because disks are shared; each
in a process of its own, so that ``extra_memory_bytes`` is its own: what its memory grew by from when everything was
imported to its peak, to be compared with ``largest_tensor_bytes``. What was written before is dropped from the system's
cache, so that the source is read from the disk; ``cached`` leaves it there.

- ``plain``: one file, 8 MiB at a time by four threads, and an fsync; through the system's cache, and past it.
  ``of_plain`` compares with the faster one.
- ``copy``: the checkpoint's bytes to one file, both past the system's cache, by four threads, and an fsync: what the
  disk gives to reads and writes together. ``of_copy`` compares with it. With ``cached`` the reads are from the cache.
- ``export``: a checkpoint of random weights to a folder of safetensors files.
- ``import``: that folder to a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gptpar.checkpoint.streamed import StreamedTensor, write_checkpoint, write_each
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.system.host import peak_process_memory, process_memory
from gptpar.system.snapshot import PIECE_BYTES
from gptpar.training.exchange.hf_export import DTYPES, ExportOptions, prepare_export
from gptpar.training.exchange.hf_folder import shapes_of
from gptpar.training.exchange.hf_import import import_hf
from gptpar.training.exchange.meta import converted_meta

FAMILIES = {
    "gpt2": "--hidden-size 1600 --num-attention-heads 25 --seq-length 1024",
    "llama": (
        "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --position-embedding-type rope --swiglu "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    ),
}
VOCAB = 32_000
OTHERS = f"--vocab-size {VOCAB} --mock-data --micro-batch-size 1 --train-iters 1 --lr 1"


def model_of(family: str, num_bytes: int) -> ModelConfig:
    """A model of about as many bytes in fp32."""

    def with_layers(number: int) -> ModelConfig:
        flags = parse_flags(f"{FAMILIES[family]} {OTHERS} --num-layers {number}".split())
        return resolve(flags, 1)[0].update("model", padded_vocab_size=VOCAB).model

    one, two = (4 * sum(map(numel, shapes_of(with_layers(number)).values())) for number in (1, 2))
    return with_layers(max(1, round((num_bytes - one) / (two - one)) + 1))


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def make_checkpoint(root: Path, model: ModelConfig) -> Path:
    tensors = (
        StreamedTensor(f"weights/{name}", partial(torch.randn, shape)) for name, shape in shapes_of(model).items()
    )
    meta = converted_meta(model, TokenizerConfig(), "nothing", vocab_size=VOCAB)
    return write_checkpoint(root, 0, partial(write_each, tensors), meta)


def plain_writes(path: Path, num_bytes: int, *, direct: bool) -> None:
    """Write and flush one file."""
    memory = mmap.mmap(-1, PIECE_BYTES)
    memory.write(os.urandom(1 << 20) * (PIECE_BYTES >> 20))
    data, how = memoryview(memory), os.O_DIRECT if direct else 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | how)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: os.pwrite(fd, data, place), range(0, num_bytes, PIECE_BYTES)))
    os.fsync(fd)
    os.close(fd)


def plain_copy(folder: Path, path: Path, num_bytes: int, *, cached: bool) -> None:
    """Copy a checkpoint's data file, as :func:`plain_writes` writes."""
    memories, direct = SimpleQueue[memoryview](), 0 if cached else os.O_DIRECT
    for _ in range(4):
        memories.put(memoryview(mmap.mmap(-1, PIECE_BYTES)))
    source = os.open(next(folder.glob("*.bin")), os.O_RDONLY | direct)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)

    def copy(place: int) -> None:
        memory = memories.get()
        os.preadv(source, [memory], place)
        os.pwrite(target, memory, place)
        memories.put(memory)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, range(0, num_bytes, PIECE_BYTES)))
    os.fsync(target)
    os.close(source)
    os.close(target)


def export(checkpoint: Path, target: Path, dtype: torch.dtype) -> None:
    prepare_export(checkpoint, target, ExportOptions(dtype=dtype)).write(target)


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def in_own_process(work: Callable[[], None]) -> dict[str, Any]:
    """Seconds and memory of a call.

    Raises:
        RuntimeError: its process died.
    """
    queue: Any = (context := multiprocessing.get_context("spawn")).SimpleQueue()
    process = context.Process(target=_measured, args=(work, queue))
    process.start()
    process.join()  # what is told fits the pipe
    if process.exitcode:
        raise RuntimeError(f"the process ended with exit status {process.exitcode}")
    found: dict[str, Any] = queue.get()
    return found


def _measured(work: Callable[[], None], queue: Any) -> None:
    torch.ones(1 << 20).sum()  # what torch sets up on first use
    before, started, busy = process_memory() or 0, time.perf_counter(), time.process_time()
    work()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    extra = max(0, (peak_process_memory() or 0) - before)
    queue.put({"seconds": seconds, "cpu_seconds": busy, "extra_memory_bytes": extra})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of weights in fp32 (default: 1.5)")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="the model's (default: llama)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the export (default: fp32)")
    parser.add_argument("--cached", action="store_true", help="leave what is read in the system's cache")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    model, dtype = model_of(args.family, int(args.gigabytes * 1e9)), DTYPES[args.dtype]
    sizes = [numel(shape) for shape in shapes_of(model).values()]
    checkpoint, folder, out = make_checkpoint(args.folder / "run", model), args.folder / "hf", args.folder / "out"
    export(checkpoint, folder, torch.float32)
    exported = sum(sizes) * dtype.itemsize
    whole = exported + -exported % PIECE_BYTES
    found: list[tuple[dict[str, Any], int, Callable[[], Any]]] = [
        ({"what": "plain"}, exported, partial(plain_writes, out, whole, direct=False)),
        ({"what": "plain", "direct": True}, exported, partial(plain_writes, out, whole, direct=True)),
        ({"what": "copy"}, sum(sizes) * 4, partial(plain_copy, checkpoint, out, sum(sizes) * 4, cached=args.cached)),
        ({"what": "export", "dtype": args.dtype}, exported, partial(export, checkpoint, out, dtype)),
        ({"what": "import"}, sum(sizes) * 4, partial(import_hf, folder, out)),
    ]
    measured: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(found))}
    for _ in range(args.rounds):
        for number in random.sample(range(len(found)), len(found)):
            os.sync() if args.cached else drop_from_cache(args.folder)
            measured[number].append(in_own_process(found[number][2]))
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    plain = copied = 0.0
    for number, results in measured.items():
        what, num_bytes, _ = found[number]
        medians = {key: statistics.median(one[key] for one in results) for key in results[0]}
        speed = num_bytes / 1e9 / medians["seconds"]
        plain = max(plain, speed) if what["what"] == "plain" else plain
        copied = speed if what["what"] == "copy" else copied
        line = {**what, "family": args.family, "cached": args.cached, "gigabytes": round(num_bytes / 1e9, 3)}
        line |= {"gb_per_s": round(speed, 3), "of_plain": round(speed / plain, 3)}
        line |= {"of_copy": round(speed / copied, 3)} if copied else {}
        line |= {"seconds": round(medians["seconds"], 3), "all_seconds": [round(one["seconds"], 3) for one in results]}
        line |= {"cpu_seconds": round(medians["cpu_seconds"], 3)}
        line |= {"extra_memory_bytes": int(medians["extra_memory_bytes"]), "largest_tensor_bytes": max(sizes) * 4}
        print(json.dumps(line), flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
