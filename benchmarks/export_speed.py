"""Times an export to Hugging Face beside plain writes of the same files on the same disk.

    PYTHONPATH=. python benchmarks/export_speed.py --folder /disk/new [--preset 1.3B | --gigabytes 1.5]
        [--family gpt2] [--dtype bf16] [--seconds 120]

Makes a checkpoint without training, its weights fp32, with two moments of each weight. Prints one JSON object. All
contenders run in turns, each round in another order, because disks are shared; rounds are repeated until ``--seconds``
are over. Each run has a process of its own. ``extra_memory_bytes`` is what it grew by from when everything was
imported to its peak, to be compared with ``largest_tensor_bytes``.

- ``plain``: the export's files, of the same sizes, 8 MiB at a time by as many threads as write an export, each file
  flushed at the end. In three ways: through the system's cache; past it; past it, into blocks of the disk that were
  reserved. ``of_plain`` compares with the fastest of them.
- ``copy``: reads as many bytes as the weights have in the checkpoint, and writes as many as the export does, past the
  system's cache in the same number of threads: what the disk gives to reads and writes together.
- ``cached``: an export whose checkpoint is in the system's cache. ``cold``: one that reads it from the disk.
- ``import``, if asked for: the exported folder to a checkpoint, from the disk.
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
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.about import about
from gptpar.checkpoint.assembly import Room
from gptpar.checkpoint.data_file import reserve_disk
from gptpar.checkpoint.patches import ParameterView
from gptpar.checkpoint.streamed import StreamedCheckpoint, StreamedPart, write_checkpoint
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.config.flags import parse_flags
from gptpar.config.presets import PRESETS
from gptpar.config.validate import resolve
from gptpar.exchange.convert import import_model
from gptpar.exchange.foreign_model import converted_meta
from gptpar.exchange.hf_export import DTYPES, Export, ExportOptions, prepare_export
from gptpar.exchange.hf_folder import shapes_of
from gptpar.system import native
from gptpar.system.host import peak_process_memory, process_memory
from gptpar.system.snapshot import PIECE_BYTES

FAMILIES = {
    "gpt2": "",
    "llama": (
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights"
    ),
}
VOCAB = 50_304
OTHERS = f"--vocab-size {VOCAB} --mock-data --micro-batch-size 1 --train-iters 1 --lr 1"
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 4096


def model_of(family: str, preset: str, num_bytes: int | None) -> ModelConfig:
    """A preset's model; ``num_bytes`` is about the size of its fp32 weights, set by the number of layers."""
    sizes = {f"--{name.replace('_', '-')}": number for name, number in PRESETS[preset].items()}

    def with_layers(number: int) -> ModelConfig:
        told = " ".join(f"{flag} {value}" for flag, value in {**sizes, "--num-layers": number}.items())
        flags = parse_flags(f"{FAMILIES[family]} {OTHERS} {told}".split())
        return resolve(flags, 1)[0].update("model", padded_vocab_size=VOCAB).model

    if num_bytes is None:
        return with_layers(sizes["--num-layers"])
    one, two = (4 * sum(map(numel, shapes_of(with_layers(number)).values())) for number in (1, 2))
    return with_layers(max(1, round((num_bytes - one) / (two - one)) + 1))


def numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def make_checkpoint(root: Path, model: ModelConfig) -> Path:
    """Write weights, then moments, of any values."""
    values = torch.randn(PIECE_BYTES)
    shapes = shapes_of(model)
    names = [(f"{kind}/{name}", name) for kind in ("weights", *MOMENTS) for name in shapes]

    def fill(file: StreamedCheckpoint) -> None:
        for full, name in names:
            view, count = ParameterView(shapes[name], lambda whole: whole), numel(shapes[name])
            whole, rest = divmod(count, len(values))
            parts = [values] * whole + [values[:rest]] * bool(rest)
            file.write(full, shapes[name], torch.float32, [StreamedPart(view, parts)])

    meta = converted_meta(model, TokenizerConfig(), "nothing", vocab_size=VOCAB)
    return write_checkpoint(root, 0, fill, meta)


@dataclass(frozen=True)
class PlainFiles:
    """Files of given sizes, each piece from or to memory of the thread.

    Attributes:
        sizes: by name.
        threads: that write.
        direct: past the system's cache.
        reserved: blocks of the disk are reserved at the beginning.
        source: a file; ``read_bytes`` bytes of it are read, a part before each write.
    """

    folder: Path
    sizes: dict[str, int]
    threads: int
    direct: bool
    reserved: bool
    source: Path | None = None
    read_bytes: int = 0
    _memory: threading.local = field(default_factory=threading.local)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _memory=threading.local())

    def write(self) -> None:
        """Write and flush all files."""
        self.folder.mkdir()
        random_bytes, how = os.urandom(1 << 20), os.O_DIRECT if self.direct else 0
        with ExitStack() as stack:
            source = -1 if self.source is None else os.open(self.source, os.O_RDONLY | os.O_DIRECT)
            pool = stack.enter_context(ThreadPoolExecutor(self.threads))
            files, work = [], []
            for name, size in self.sizes.items():
                fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | how)
                files.append(fd)
                if self.reserved:
                    reserve_disk(fd, 0, size)
                work += [(fd, place, min(PIECE_BYTES, size - place)) for place in range(0, size, PIECE_BYTES)]
            reads = [self.read_bytes * number // len(work) // BLOCK * BLOCK for number in range(len(work) + 1)]

            def move(piece: tuple[int, int, int], begin: int, end: int) -> None:
                if not hasattr(self._memory, "data"):
                    self._memory.data = mmap.mmap(-1, PIECE_BYTES)
                    self._memory.data.write(random_bytes * (PIECE_BYTES >> 20))
                data = memoryview(self._memory.data)
                for place in range(begin, end, PIECE_BYTES):
                    os.preadv(source, [data[: min(PIECE_BYTES, end - place)]], place)
                fd, place, size = piece
                os.pwrite(fd, data[: size + -size % BLOCK], place)

            list(pool.map(move, work, reads, reads[1:]))
            for fd, size in zip(files, self.sizes.values(), strict=True):
                os.ftruncate(fd, size)
            list(pool.map(os.fsync, files))
            for fd in files:
                os.close(fd)


def export(checkpoint: Path, target: Path, dtype: torch.dtype) -> None:
    prepare_export(checkpoint, target, ExportOptions(dtype=dtype)).write(target)


def file_sizes(prepared: Export) -> dict[str, int]:
    """Bytes of each weight file."""
    return {name: 8 + len(header.encode()) + _end(header) for name, header in prepared.headers.items()}


def _end(header: str) -> int:
    fields = json.loads(header)
    return max(int(one["data_offsets"][1]) for name, one in fields.items() if name != "__metadata__")


def read_into_cache(path: Path, num_bytes: int) -> None:
    """Let the system's cache have a file's beginning."""
    memory = memoryview(mmap.mmap(-1, PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while file.tell() < num_bytes and file.readinto(memory):
            pass


def drop_from_cache(files: Iterable[Path]) -> None:
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def in_own_process(work: Callable[[], None]) -> dict[str, float]:
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
    found: dict[str, float] = queue.get()
    return found


def _measured(work: Callable[[], None], queue: Any) -> None:
    torch.ones(1 << 20).sum()  # what torch sets up on first use
    before, started, busy = process_memory() or 0, time.perf_counter(), time.process_time()
    work()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    extra = max(0, (peak_process_memory() or 0) - before)
    queue.put({"seconds": seconds, "cpu_seconds": busy, "extra_memory_bytes": extra})


def figures(runs: Sequence[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    """What several runs of one contender took."""
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {
        "gb_per_s": round(num_bytes / 1e9 / medians["seconds"], 3),
        "cpu_seconds_per_gb": round(medians["cpu_seconds"] / (num_bytes / 1e9), 3),
        "extra_memory_bytes": int(max(run["extra_memory_bytes"] for run in runs)),
        "all_seconds": [round(run["seconds"], 3) for run in runs],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder on the disk to measure")
    parser.add_argument("--preset", choices=PRESETS, default="350M", help="the model's size (default: 350M)")
    parser.add_argument("--gigabytes", type=float, help="of weights in fp32: with another number of layers")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="the model's (default: llama)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the export (default: fp32)")
    parser.add_argument("--import", action="store_true", dest="imports", help="time the way back as well")
    parser.add_argument("--seconds", type=float, default=120, help="after which no round begins (default: 120)")
    return parser.parse_args()


def main() -> None:
    started, args = time.perf_counter(), arguments()
    for helper in ("crc32", "strided_copy"):
        native.load(helper)
    args.folder.mkdir(parents=True)
    given = None if args.gigabytes is None else int(args.gigabytes * 1e9)
    model, dtype, out = model_of(args.family, args.preset, given), DTYPES[args.dtype], args.folder / "out"
    weights = [4 * numel(shape) for shape in shapes_of(model).values()]
    checkpoint = make_checkpoint(args.folder / "run", model)
    sizes, threads = (
        file_sizes(prepare_export(checkpoint, out, ExportOptions(dtype=dtype))),
        Room.within(max(weights)).writers,
    )
    (data,) = checkpoint.glob("*.bin")

    def plain(direct: bool, reserved: bool, source: Path | None = None) -> Callable[[], None]:
        return PlainFiles(out, sizes, threads, direct, reserved, source, sum(weights) if source else 0).write

    ways = {"through the cache": plain(False, False), "direct": plain(True, False), "reserved": plain(True, True)}
    contenders = {**ways, "copy": plain(True, True, data)}
    contenders |= dict.fromkeys(("cached", "cold"), partial(export, checkpoint, out, dtype))
    kept: list[Path] = []
    if args.imports:
        export(checkpoint, args.folder / "hf", dtype)
        contenders["import"] = partial(import_model, args.folder / "hf", out)
        kept = list((args.folder / "hf").iterdir())
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    while not runs["cold"] or time.perf_counter() - started < args.seconds:
        for name in random.sample(list(contenders), len(contenders)):
            drop_from_cache([data, *kept])
            if name == "cached":
                read_into_cache(data, sum(weights))
            runs[name].append(in_own_process(contenders[name]))
            shutil.rmtree(out)
    written = sum(sizes.values())
    found = {name: figures(some, sum(weights) if name == "import" else written) for name, some in runs.items()}
    fastest = max(ways, key=lambda way: found[way]["gb_per_s"])
    ratios = {
        name: round(found[name]["gb_per_s"] / found[fastest]["gb_per_s"], 3) for name in found if name not in ways
    }
    line = {
        "what": "export",
        "family": args.family,
        "model": args.preset,
        "dtype": args.dtype,
        "gb_of_checkpoint": round(data.stat().st_size / 1e9, 3),
        "gb_of_weights": round(sum(weights) / 1e9, 3),
        "gb_written": round(written / 1e9, 3),
        "files": len(sizes),
        "threads": threads,
        "plain": fastest,
        "plain_gb_per_s": found[fastest]["gb_per_s"],
        "of_plain": ratios,
        "extra_memory_bytes": max(found[name]["extra_memory_bytes"] for name in ("cached", "cold")),
        "largest_tensor_bytes": max(weights),
        "contenders": found,
        "seconds_in_all": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(line | about("torch")), flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
