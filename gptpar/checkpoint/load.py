"""Loads a checkpoint: proves every byte before use, and falls back from a damaged checkpoint to an older one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gptpar.checkpoint import folders
from gptpar.checkpoint.folders import find_checkpoints
from gptpar.checkpoint.manifest import DamagedCheckpoint, Manifest, dtype_name, read_manifest
from gptpar.checkpoint.proofs import known_problems
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.save import print_report
from gptpar.checkpoint.storage import fill
from gptpar.checkpoint.verify import Report, damaged_files, damaged_on_any_rank, report_all
from gptpar.errors import CheckpointError
from gptpar.system.host import available_memory
from gptpar.topology.tensor_parts import Box, TensorParts, as_parts

T = TypeVar("T")

MAX_LISTED = 8
"""Differences listed one by one: another width changes every tensor, which says no more than a few do."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of loading a checkpoint.

    Attributes:
        meta: the dictionary given to `save_checkpoint`.
        path, iteration: the checkpoint used.
        skipped: newer checkpoints that were damaged, and how, one sentence each.
        completed: what ``complete`` returned of this checkpoint.
    """

    meta: dict[str, Any]
    path: Path
    iteration: int
    skipped: list[str]
    completed: Any = None


def load_checkpoint(
    root: str | Path | Sequence[Path],
    targets: Mapping[str, torch.Tensor | TensorParts],
    *,
    iteration: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    may_stay: Callable[[str], bool] = lambda name: False,
    may_cast: Callable[[str, torch.dtype], bool] = lambda name, stored: False,
    complete: Callable[[Path, Manifest], Any] = lambda path, manifest: None,
    prove_first: bool = False,
    remedy: str = "",
    apart: Path | None = None,
    report: Report = print_report,
) -> LoadedCheckpoint:
    """Fill `targets` in place from the newest whole checkpoint, whatever layout saved it.

    Every rank of the group calls this. Each piece of 8 MiB is read once, checked, and then copied. So earlier pieces
    may be in the targets when damage is found. An older checkpoint then overwrites all of them; without one, the
    targets stay partly filled.

    Args:
        root: directory of the run's checkpoints, or several: the newest whole one of all is taken.
        targets: by global name; plain tensors take the whole tensor, `TensorParts` their boxes of it, on any
            device.
        iteration: load this one and no other; None: the newest that is whole.
        process_group: default: all processes, or this one alone where torch.distributed is not initialised.
        strict: whether names that only the checkpoint or only `targets` has are errors; else they are reported and
            left alone. Shapes must always match, and so must dtypes, unless ``may_cast`` allows another.
        may_stay: names in the checkpoint that need not be loaded, however strict.
        may_cast: (name, stored dtype) -> whether the tensor may have another dtype here. Its values are then rounded
            to nearest even.
        complete: is called with each checkpoint that has filled this process's targets, and may read more of it.
        prove_first: read every byte, each rank a share of them, before the first one is copied: where no checkpoint is
            whole, the targets are then untouched.
        remedy: what to do where the checkpoint does not match, for the error.
        apart: the root that is not shared: each machine has its own folder, at a path that may differ, which holds the
            files that its processes read, and no others.
        report: called on rank 0 with a sentence about each damaged checkpoint that is skipped, and about names that
            only one side has.

    Raises:
        DamagedCheckpoint: none is whole; all are listed with their damage.
        CheckpointError: no checkpoint, or names, shapes or dtypes that do not match (all are listed; the targets are
            untouched).
    """
    ranks, roots = Ranks(process_group), [Path(root)] if isinstance(root, str | Path) else list(root)
    candidates = ranks.lead(lambda: _candidates(roots, iteration))
    skipped: list[str] = []
    for number, place, name in candidates:
        path = roots[place] / name
        try:
            manifest = ranks.lead(partial(_open, path, number, has_all=roots[place] != apart))
            _require_match(ranks, manifest, targets, path, strict, may_stay, may_cast, remedy, report)
            if prove_first and (problems := damaged_on_any_rank(ranks, path, manifest)):
                raise DamagedCheckpoint("\n".join(problems))
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # targets are filled on other threads' streams
            known = {name: targets[name] for name in targets if name in manifest.tensors}
            completed = _read(ranks, path, manifest, known, complete)
            return LoadedCheckpoint(manifest.meta, path, number, skipped, completed)
        except DamagedCheckpoint as error:
            skipped.append(f"{path}: {error}")
            ranks.lead(partial(report, f"skipped a damaged checkpoint: {error}"))
    listing = "\n".join(skipped)
    raise DamagedCheckpoint(
        f"no whole checkpoint in {_named(roots)}, so nothing can be resumed from it. Damaged:\n{listing}"
    )


def load_meta(root: str | Path) -> dict[str, Any]:
    """The meta dictionary of the newest checkpoint in `root` with a readable manifest, or of `root` itself.

    Raises:
        CheckpointError: there is none.
    """
    paths = [path for _, path in folders.find_checkpoints(root)] or [Path(root)]
    problems: list[str] = []
    if (manifest := first_usable(paths, read_manifest, problems)) is None:
        raise CheckpointError(f"no readable checkpoint in {root}:\n" + "\n".join(problems))
    return manifest.meta


def read_tensors(
    path: str | Path,
    names: Iterable[str] | None = None,
    manifest: Manifest | None = None,
    boxes: Mapping[str, Box] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of one checkpoint, in host memory, by this process alone.

    Args:
        path: a checkpoint directory.
        names: which tensors; None: all.
        manifest: the checkpoint's, if it has been read.
        boxes: (offsets, sizes) of the part of a tensor that is read, by its name; all others are read whole.

    Raises:
        CheckpointError: names that it does not hold (all are listed), or tensors that do not fit this machine's memory.
        DamagedCheckpoint: the first damaged piece, or files of holes that do not fit memory.
    """
    path = Path(path)
    manifest = manifest or read_manifest(path)
    names = list(manifest.tensors if names is None else names)
    if unknown := [name for name in names if name not in manifest.tensors]:
        raise CheckpointError(f"{path} has no tensor named {', '.join(map(repr, unknown))}")
    if problems := damaged_files(path, manifest):
        raise DamagedCheckpoint("\n".join(problems))
    entries = {name: manifest.tensors[name] for name in names}
    boxes = {name: ((0,) * len(entry.shape), entry.shape) for name, entry in entries.items()} | dict(boxes or {})
    tensors = _allocate(path, manifest, {name: (boxes[name][1], entry.dtype) for name, entry in entries.items()})
    parts = {
        name: TensorParts(torch.Size(entry.shape), ((boxes[name][0], tensors[name]),), entry.dtype)
        for name, entry in entries.items()
    }
    _read(Ranks(None, alone=True), path, manifest, parts)
    return tensors


def _allocate(
    path: Path, manifest: Manifest, kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Memory for tensors of these shapes. A stranger's checkpoint may name any shapes; sparse files cost it nothing."""
    needed, free = sum(prod(shape) * dtype.itemsize for shape, dtype in kinds.values()), available_memory()
    try:
        if free and needed > free:
            raise MemoryError
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    except (RuntimeError, MemoryError):  # torch's allocator on a CPU has no error of its own
        sizes = manifest.file_sizes()
        on_disk = sum((path / name).stat().st_blocks * 512 for name in sizes)
        if on_disk < sum(sizes.values()) // 2:
            raise DamagedCheckpoint(
                f"{path} names {sum(sizes.values()):,} bytes and takes {on_disk:,} of the disk: its files are holes"
            ) from None
        raise CheckpointError(
            f"{path} holds {needed / 2**30:,.1f} GiB of tensors and this machine has {free / 2**30:,.1f} GiB of memory "
            "to spare; read fewer of them, or use a larger machine"
        ) from None


def _named(roots: Sequence[Path]) -> str:
    return " and ".join(map(str, roots))


def _candidates(roots: list[Path], iteration: int | None) -> list[tuple[int, int, str]]:
    """(iteration, index of its root, name of its folder) of each checkpoint that may be loaded, newest first."""
    found = [(number, roots.index(path.parent), path.name) for number, path in checkpoints_in(roots)]
    if not found:
        raise CheckpointError(f"there is no checkpoint (iter_*) in {_named(roots)}")
    if iteration is None:
        return found
    chosen = [one for one in found if one[0] == iteration]
    if not chosen:
        have = ", ".join(str(number) for number, *_ in found)
        raise CheckpointError(f"{_named(roots)} has no checkpoint of iteration {iteration}; it has {have}")
    return chosen


def _open(path: Path, iteration: int, *, has_all: bool) -> Manifest:
    manifest = read_manifest(path)
    problems = damaged_files(path, manifest) if has_all else []
    if manifest.iteration != iteration:
        problems.append(f"{path} says of itself that it is iteration {manifest.iteration}")
    if problems:
        raise DamagedCheckpoint("\n".join(problems))
    return manifest


def _require_match(
    ranks: Ranks,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor | TensorParts],
    path: Path,
    strict: bool,
    may_stay: Callable[[str], bool],
    may_cast: Callable[[str, torch.dtype], bool],
    remedy: str,
    report: Report,
) -> None:
    """Require matching names, shapes and dtypes on all ranks, before anything is read."""
    gathered = ranks.each(lambda: (set(targets), _mismatches(manifest, targets, may_cast)))
    wanted = set().union(*(names for names, _ in gathered))
    stored = {name for name in manifest.tensors if name in wanted or not may_stay(name)}
    strays = [f"tensor {name!r} is not in the checkpoint" for name in sorted(wanted - stored)]
    strays += [f"tensor {name!r} is in the checkpoint and nothing asks for it" for name in sorted(stored - wanted)]
    problems = sorted({problem for _, found in gathered for problem in found})
    if strict:
        problems += strays
    elif strays:
        ranks.lead(lambda: report_all(report, [f"{stray}; left alone" for stray in strays]))
    if problems:
        raise CheckpointError("\n".join(_does_not_fit(path, problems, remedy)))


def _does_not_fit(path: Path, problems: list[str], remedy: str) -> Iterator[str]:
    yield f"{path} does not fit this model ({len(problems)} differences):"
    yield from (f"  {number}. {problem}" for number, problem in enumerate(problems[:MAX_LISTED], 1))
    if len(problems) > MAX_LISTED:
        yield f"  and {len(problems) - MAX_LISTED} more"
    if remedy:
        yield remedy


def _mismatches(
    manifest: Manifest, targets: Mapping[str, torch.Tensor | TensorParts], may_cast: Callable[[str, torch.dtype], bool]
) -> list[str]:
    problems = []
    for name, target in targets.items():
        if (entry := manifest.tensors.get(name)) is None:
            continue
        if entry.shape != tuple(target.shape):
            problems.append(f"tensor {name!r} is {list(entry.shape)} in the checkpoint and {list(target.shape)} here")
        if entry.dtype != target.dtype and not may_cast(name, entry.dtype):
            stored, here = dtype_name(entry.dtype), str(target.dtype).removeprefix("torch.")
            problems.append(f"tensor {name!r} is {stored} in the checkpoint and {here} here; it is not cast")
    return problems


def _read(
    ranks: Ranks,
    path: Path,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor | TensorParts],
    complete: Callable[[Path, Manifest], Any] = lambda path, manifest: None,
) -> Any:
    parts = {name: as_parts(target) for name, target in targets.items()}

    def read() -> Any:
        fill(path, manifest, parts)
        return complete(path, manifest)

    return ranks.through_main(read, lambda found: found)


def checkpoints_in(roots: Iterable[str | Path]) -> list[tuple[int, Path]]:
    """(iteration, path) of every published checkpoint, newest first; those of one iteration in the folders' order."""
    found = [one for root in roots for one in find_checkpoints(root)]
    return sorted(found, key=lambda one: -one[0])


def first_usable(paths: Iterable[Path], use: Callable[[Path], T], problems: list[str] | None = None) -> T | None:
    """The result of ``use`` on the first checkpoint that it accepts; ``None``: it accepts none.

    Args:
        use: raises CheckpointError if a checkpoint cannot be used.
        problems: gets the errors of those before.
    """
    for path in paths:
        try:
            return use(path)
        except CheckpointError as error:
            if problems is not None:
                problems.append(str(error))
    return None


def newest_whole(roots: Iterable[str | Path]) -> tuple[int, Path] | None:
    """The newest checkpoint with a sound manifest and files of full size; ``None``: there is none.

    The bytes are not read. Loading proves them, and takes an older checkpoint if they are damaged.
    """
    return next(((number, path) for number, path in checkpoints_in(roots) if not known_problems(number, path)), None)
