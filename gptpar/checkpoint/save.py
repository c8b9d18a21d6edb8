"""Saves a checkpoint: it appears whole, under its final name, or not at all; old checkpoints are removed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptpar.checkpoint import folders, proofs
from gptpar.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedCheckpoint,
    Manifest,
    TensorEntry,
    dtype_name,
    file_of,
    read_manifest,
)
from gptpar.checkpoint.moving import move_files
from gptpar.checkpoint.ranks import MachineRanks, Ranks, as_checkpoint_error
from gptpar.checkpoint.ring import Ring
from gptpar.checkpoint.storage import ChunkWriter
from gptpar.checkpoint.tokenizer_copy import with_digests, write_copy
from gptpar.checkpoint.verify import Report, damaged_files, damaged_on_any_rank, report_all
from gptpar.errors import CheckpointError
from gptpar.system.files import write_synced
from gptpar.system.snapshot import Snapshot
from gptpar.system.switch_interval import SWITCH_INTERVAL
from gptpar.topology.tensor_parts import TensorParts, as_parts, tensors_of

_SHARED_DIRECTORY_SECONDS = 10.0


def print_report(sentence: str) -> None:
    """The default `report`: one line on stderr."""
    print(f"checkpoint: {sentence}", file=sys.stderr, flush=True)


def save_checkpoint(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor | TensorParts],
    meta: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    keep: int | None = None,
    retain: int | None = None,
    replaces: Sequence[Path] = (),
    report: Report = print_report,
    permit: Callable[[], None] | None = None,
    snapshot: Snapshot | None = None,
    ring: Ring | None = None,
    moved: Callable[[], None] = lambda: None,
    tokenizer_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save tensors as one logical checkpoint, whatever layout they are held in.

    Every rank of the group calls this. Memory: nothing beyond the live tensors but a few pieces of 8 MiB; without a
    snapshot, the tensors must not change until it returns. Whatever happens meanwhile (an error, a full disk, kill -9),
    older checkpoints stay as they are and no half-written one takes a final name.

    Args:
        root, iteration: the checkpoint is `root/iter_0000010`, on a file system that all ranks share.
        tensors: by global name. A plain tensor is all of one, `TensorParts` are the boxes of it that this rank
            holds; a box that several ranks hold is a replica and is written once. Ranks may hold different names
            (pipeline stages); together they must hold every element of every tensor.
        meta: rank 0's is stored, as JSON gives it back (tuples become lists).
        process_group: default: all processes, or this one alone where torch.distributed is not initialised.
        keep: delete all but the newest `keep` checkpoints up to this iteration, once one of those kept has been
            re-read from the disk and proved whole; None keeps all. Later iterations belong to another history: they
            are neither counted nor deleted.
        retain: with `keep`, iterations that are divisible by this are never deleted.
        replaces: checkpoints in `root` to be deleted once the new one has been re-read and proved whole; of rank 0.
        report: called on rank 0 with sentences about what it cleaned, moved aside or kept.
        permit: rank 0 asks before it writes, publishes or deletes anything, and at the end, whether the folder is
            still this run's; what it raises ends the save on every rank.
        snapshot: of the same tensors, whose bytes of its moment are saved: they may change meanwhile.
        ring: of machines that have a folder `root` each. Each gets the files of its processes and of those of the
            machine before it, and all publish once all files are there; see `Copies`. `keep` must be None.
        moved: is called, by any thread, whenever this rank has written a piece or read one back.
        tokenizer_files: name -> contents; rank 0's are stored, or with a ring, those of each machine's first rank.

    Returns:
        The checkpoint's path. A whole checkpoint of this iteration with the same tensors' names, dtypes and
        shapes and the same meta is proved and kept, not written again; a damaged one is moved aside first.

    Raises:
        CheckpointError: on every rank, if any fails; if ranks disagree about a tensor, an element is in no rank's boxes
            or in two, or the disk lacks room (nothing is written then); if a whole checkpoint with other contents is
            there.
    """
    ranks = Ranks(process_group, moved) if ring is None else MachineRanks(process_group, ring, moved)
    root, permit, meta = Path(root), permit or (lambda: None), with_digests(meta, tokenizer_files)
    final = folders.checkpoint_path(root, iteration)
    table = _union(ranks.each(lambda: _check_input(iteration, tensors, meta, keep)))
    is_there = ranks.lead(lambda: _prepare(final, permit, report))
    if is_there and _existing_is_whole(ranks, final, report):
        ranks.lead(lambda: _require_same(final, table, meta))
    else:
        if is_there:
            ranks.lead(lambda: report(f"{final} is damaged; moved to {folders.move_aside(final)}"))
        held = {name: as_parts(tensor) for name, tensor in tensors.items()}
        _write(ranks, final, iteration, held, table, meta, permit, snapshot, tokenizer_files)
        ranks.lead(lambda: _update_hint(root, iteration, report))
    if keep is not None:
        _retain(ranks, root, iteration, keep, retain, report, permit)
    if old := ranks.lead(lambda: list(replaces)):
        if _existing_is_whole(ranks, final, report):
            _remove_all(ranks, old, permit)
        else:
            ranks.lead(lambda: report(f"kept {', '.join(map(str, old))}: {final} could not be proved whole"))
    ranks.lead(permit)
    return final


def _check_input(
    iteration: int, tensors: Mapping[str, torch.Tensor | TensorParts], meta: dict[str, Any], keep: int | None
) -> dict[str, list[Any]]:
    """This rank's table name -> [dtype, shape]; raises CheckpointError with everything that is wrong."""
    problems = [] if iteration >= 0 else [f"iteration is {iteration}; it must be at least 0"]
    if keep is not None and keep < 1:
        problems.append(f"keep is {keep}; it must be at least 1, or None to keep all")
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        problems.append(f"meta cannot be stored as JSON: {error}")
    table = {}
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            problems.append(f"{name!r} is no dense tensor with data; put other state into meta")
            continue
        try:
            table[name] = [dtype_name(tensor.dtype), list(tensor.shape)]
        except CheckpointError as error:
            problems.append(f"tensor {name!r}: {error}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return table


def _is_dense(tensor: object) -> bool:
    """Whether every part is a tensor with bytes of its own; subclasses such as DTensor may hold less than they say."""
    held: list[Any] = [part for _, part in tensor.parts] if isinstance(tensor, TensorParts) else [tensor]
    kinds = (torch.Tensor, torch.nn.Parameter)
    return all(type(t) in kinds and t.layout == torch.strided and not t.is_meta for t in held)


def _union(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """All ranks' tensors; raises CheckpointError where they disagree."""
    union: dict[str, list[Any]] = {}
    for rank, table in enumerate(tables):
        for name, entry in table.items():
            if (known := union.setdefault(name, entry)) != entry:
                other = next(rank for rank, table in enumerate(tables) if name in table)
                raise CheckpointError(
                    f"ranks disagree about tensor {name!r}: {entry[0]} {entry[1]} on rank {rank}, "
                    f"{known[0]} {known[1]} on rank {other}"
                )
    return union


def _prepare(final: Path, permit: Callable[[], None], report: Report) -> bool:
    """Make the folder of checkpoints ready, if that is permitted; returns whether this one is there already."""
    permit()
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in folders.remove_dead_saves(final.parent):
        report(f"removed {path}, left by a save that died")
    return final.exists()


def _existing_is_whole(ranks: Ranks, path: Path, report: Report) -> bool:
    """Re-read a published checkpoint, a share per rank."""
    try:
        manifest = ranks.lead(lambda: read_manifest(path))
    except DamagedCheckpoint as error:
        problems = [str(error)]
    else:
        problems = ranks.lead(lambda: damaged_files(path, manifest))
        if not problems:
            problems = damaged_on_any_rank(ranks, path, manifest)
            ranks.lead(lambda: proofs.remember(path, problems))
    ranks.lead(lambda: report_all(report, problems))
    return not problems


def _require_same(final: Path, table: dict[str, list[Any]], meta: dict[str, Any]) -> None:
    manifest = read_manifest(final)
    stored = {name: [dtype_name(entry.dtype), list(entry.shape)] for name, entry in manifest.tensors.items()}
    if stored != table or manifest.meta != json.loads(json.dumps(meta)):
        raise CheckpointError(
            f"{final} is a whole checkpoint with other contents and is not overwritten; move it away, or save elsewhere"
        )


def _write(
    ranks: Ranks,
    final: Path,
    iteration: int,
    tensors: dict[str, TensorParts],
    table: dict[str, list[Any]],
    meta: dict[str, Any],
    permit: Callable[[], None],
    snapshot: Snapshot | None,
    tokenizer_files: Mapping[str, bytes] | None,
) -> None:
    """Write into a temporary directory; rank 0 publishes it in the last step, after all succeeded."""
    temporary = ranks.lead(lambda: _make_temporary(final.parent, iteration))

    def publish(manifest: Manifest) -> None:
        write_copy(temporary, tokenizer_files)
        write_synced(temporary / MANIFEST_NAME, manifest.to_json())
        permit()
        folders.publish(temporary, final)

    entries = {name: TensorEntry(getattr(torch, dtype), tuple(shape), ()) for name, (dtype, shape) in table.items()}
    on_machines = ranks if isinstance(ranks, MachineRanks) else None
    written: list[Manifest] = []
    try:
        ranks.each(lambda: _require_shared(temporary))
        writer = ChunkWriter(
            *(temporary, ranks, iteration, entries, meta, snapshot or Snapshot(tensors_of(tensors.values()))),
            publish if on_machines is None else written.append,
            together=None if on_machines is None else on_machines.ring.kept_by(0),
        )
        with SWITCH_INTERVAL.short():
            writer.save(tensors)
        if on_machines is not None:  # send this process's file to the next machine, take one from the machine before
            mine = temporary / file_of(ranks.rank)
            sizes = ranks.each(lambda: mine.stat().st_size if mine.exists() else 0)
            move_files(on_machines, on_machines.ring.copies(sizes), temporary)
            manifest = on_machines.main(lambda: written[0])
            ranks.lead(lambda: publish(manifest))
    except BaseException as error:
        if ranks.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        if (known := as_checkpoint_error(error)) is error:
            raise
        raise known from error


def _make_temporary(root: Path, iteration: int) -> Path:
    temporary = folders.temporary_path(root, iteration)
    temporary.mkdir()
    return temporary


def _require_shared(directory: Path) -> None:
    """Require that every rank sees rank 0's directory, for one rename publishes all files; network mounts may lag."""
    give_up = time.monotonic() + _SHARED_DIRECTORY_SECONDS
    while not directory.is_dir():
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{os.uname().nodename} does not see {directory}, which rank 0 made: checkpoints need "
                "a directory that all nodes share; give a path on the shared file system"
            )
        time.sleep(0.1)


def _update_hint(root: Path, iteration: int, report: Report) -> None:
    try:
        folders.write_hint(root, iteration)
    except OSError as error:  # the checkpoint itself is published and whole
        report(f"could not update {root / folders.HINT_NAME}: {error.strerror}")


def _retain(
    ranks: Ranks,
    root: Path,
    iteration: int,
    keep: int,
    retain: int | None,
    report: Report,
    permit: Callable[[], None],
) -> None:
    """Delete this history's checkpoints but the newest `keep` and the multiples of `retain`, if a whole one remains."""
    found = ranks.lead(lambda: folders.find_checkpoints(root))
    if len(found) <= keep:
        return
    own = [path for number, path in found if number <= iteration]
    newest = [path for _, path in found[:keep]]  # differs from own[:keep] only if there are later iterations
    for kept in [newest] if newest == own[:keep] else [newest, own[:keep]]:
        if not any(_existing_is_whole(ranks, path, report) for path in kept):
            ranks.lead(lambda: report(f"kept all of {root}: none of the newest {keep} could be proved whole"))
            return
    retained = {path for number, path in found if retain is not None and number % retain == 0}
    _remove_all(ranks, [path for path in own[keep:] if path not in retained], permit)


def _remove_all(ranks: Ranks, paths: Sequence[Path], permit: Callable[[], None]) -> None:
    for path in paths:
        ranks.lead(permit)
        ranks.lead(partial(_remove, path))


def _remove(path: Path) -> None:
    folders.remove_checkpoint(path)
    proofs.forget(path)
