"""The copies of a run's state in the memories of its machines, and how a lost machine's files are restored.

Every machine has a folder of its own, with the form of a checkpoint folder. For each copy the folder holds the
manifest, the files of the machine's own processes, and the files of the machine before it (``ring``). So every file is
on two machines.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptpar.checkpoint import folders
from gptpar.checkpoint.manifest import MANIFEST_NAME, DamagedCheckpoint, Manifest, read_manifest
from gptpar.checkpoint.moving import move_files
from gptpar.checkpoint.ranks import MachineRanks
from gptpar.checkpoint.ring import Move, Ring
from gptpar.checkpoint.tokenizer_copy import FOLDER
from gptpar.checkpoint.verify import Report, sound_files
from gptpar.errors import CheckpointError
from gptpar.system.files import read_regular
from gptpar.topology.tensor_parts import TensorParts, overlap

Key = tuple[int, str]
"""Iteration and digest of the manifest. The digest keeps files of two different copies apart."""

MAX_NAMED = 4


@dataclass(frozen=True)
class _Held:
    """A machine's files of one copy.

    Attributes:
        on_all: bytes of the manifest and of the tokenizer's files, which all machines have, by name.
        names: names of all files of the copy.
        files: names of the files that the machine has in full length.
    """

    on_all: Mapping[str, int]
    names: frozenset[str]
    files: frozenset[str]


class Copies:
    """The copies of all machines; every process has one and calls the same methods in the same order.

    Args:
        folder: this machine's folder of copies.
        ring: the machines.
        report: prints what was lost and what was restored.
    """

    def __init__(self, folder: Path, ring: Ring, report: Report):
        self.folder, self.ring, self._report = folder, ring, report
        self.ranks = MachineRanks(None, ring)
        self._machine = ring.machine_of(self.ranks.rank)

    def agree(self) -> Path | None:
        """Find the newest copy of which no file is lost: some machine has each in full length. Bytes are checked later.

        Afterwards every machine has the manifest of that copy, and no newer copy.

        Returns:
            The copy's folder on this machine; ``None``: there is no such copy.
        """
        held = self._survey()
        for key in sorted({key for of_machine in held for key in of_machine}, reverse=True):
            parts = [of_machine.get(key) for of_machine in held]
            there = frozenset().union(*(part.files for part in parts if part is not None))
            names = next(part.names for part in parts if part is not None)
            if lost := sorted(names - there):
                self._report_lost(key[0], lost)
                continue
            self.ranks.lead(partial(self._remove_after, key[0]))
            self._spread_manifest(key[0], parts)
            return folders.checkpoint_path(self.folder, key[0])
        self.ranks.lead(partial(self._remove_after, -1))
        return None

    def complete(self, tensors: Mapping[str, TensorParts]) -> None:
        """Restore the files that this machine keeps and those that its processes will load, as far as they are lost.

        Files are proved by their checksums first, and a damaged file is replaced. If some file is whole on no machine,
        that copy is given up, and an older copy is taken, if there is one.

        Args:
            tensors: the tensors that this process will load.
        """
        while not self.ring.is_alone and (path := self.agree()) is not None:
            if self._complete(path, tensors):
                return
            self.ranks.lead(partial(folders.remove_checkpoint, path))

    def _survey(self) -> list[dict[Key, _Held]]:
        """The copies that each machine has."""
        found = self.ranks.each(lambda: self._own() if self.ranks.leads else ({}, []))
        leaders = [found[ranks[0]] for ranks in self.ring.machines]
        self._report_unreadable([problem for _, problems in leaders for problem in problems])
        return [held for held, _ in leaders]

    def _own(self) -> tuple[dict[Key, _Held], list[str]]:
        """(this machine's copies, sentences about files that cannot be read: other machines may have these)."""
        held: dict[Key, _Held] = {}
        problems = []
        for number, path in folders.find_checkpoints(self.folder):
            try:
                manifest, text = read_manifest(path), read_regular(path / MANIFEST_NAME)
                sizes = manifest.file_sizes()
                there = {name for name in os.listdir(path) if name in sizes and _length(path / name) == sizes[name]}
                copied = {f"{FOLDER}/{file.name}": file.stat().st_size for file in (path / FOLDER).glob("*")}
            except DamagedCheckpoint as error:
                problems.append(str(error))
                continue
            except OSError as error:
                problems.append(f"{error.filename or path} cannot be read: {error.strerror}")
                continue
            key = number, hashlib.sha256(text).hexdigest()
            held[key] = _Held({MANIFEST_NAME: len(text), **copied}, frozenset(sizes), frozenset(there))
        return held, problems

    def _remove_after(self, iteration: int) -> None:
        for number, path in folders.find_checkpoints(self.folder):
            if number > iteration:
                folders.remove_checkpoint(path)

    def _spread_manifest(self, iteration: int, parts: list[_Held | None]) -> None:
        """Give each machine that lacks the manifest a folder with it and the tokenizer; another copy's folder goes."""
        lacking = [machine for machine, part in enumerate(parts) if part is None]
        if not lacking:
            return
        source, files = next((n, part.on_all) for n, part in enumerate(parts) if part is not None)
        final = folders.checkpoint_path(self.folder, iteration)

        def prepare() -> Path:
            if self._machine not in lacking:
                return final
            if final.exists():
                folders.remove_checkpoint(final)
            temporary = folders.temporary_path(self.folder, iteration)
            for name in files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            return temporary

        folder = self.ranks.lead(prepare)
        moves = [
            Move(self.ring.machines[source][0], self.ring.machines[machine][0], name, size)
            for machine in lacking
            for name, size in files.items()
        ]
        move_files(self.ranks, moves, folder)
        self.ranks.lead(lambda: folders.publish(folder, final) if folder != final else None)

    def _complete(self, path: Path, tensors: Mapping[str, TensorParts]) -> bool:
        manifest = read_manifest(path)
        sizes = manifest.file_sizes()
        sound = self._sound(path, manifest)
        wanted = self.ring.wanted(self.ranks.each(lambda: files_read(manifest, tensors)), sizes)
        if lost := sorted(set().union(*wanted) - set().union(*sound)):
            self._report_lost(manifest.iteration, lost)
            return False
        moves = self.ring.repairs(wanted, sound, sizes)
        try:
            move_files(self.ranks, moves, path)
        except CheckpointError as error:
            self._report(f"the copy of iteration {manifest.iteration} in memory could not be restored: {error}")
            return False
        if moves:
            self._report(
                f"restored the copy of iteration {manifest.iteration} in memory: {len(moves)} files "
                f"({sum(move.num_bytes for move in moves) / 1e9:.3g} GB) were sent to machines that lacked them"
            )
        return True

    def _sound(self, path: Path, manifest: Manifest) -> list[set[str]]:
        """Names of each machine's files whose bytes are as saved; the files are divided among its processes."""
        mine = self.ring.machines[self._machine]
        names = sorted(manifest.file_sizes())[mine.index(self.ranks.rank) :: len(mine)]
        found = self.ranks.each(lambda: sound_files(path, manifest, names))
        self._report_unreadable([problem for _, problems in found for problem in problems])
        return [set().union(*(found[rank][0] for rank in ranks)) for ranks in self.ring.machines]

    def _report_unreadable(self, problems: list[str]) -> None:
        if problems:
            more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
            self._report(
                f"{'; '.join(problems[:MAX_NAMED])}{more}: another machine's file, an older copy or the disk serves"
            )

    def _report_lost(self, iteration: int, names: list[str]) -> None:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        self._report(
            f"the copy of iteration {iteration} in memory is given up, for no machine has all bytes of "
            f"{', '.join(names[:MAX_NAMED])}{more}: the run goes on from an older copy, or from the disk"
        )


def _length(file: Path) -> int | None:
    """Bytes of a file; ``None``: the system does not say it."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def files_read(manifest: Manifest, tensors: Mapping[str, TensorParts]) -> set[str]:
    """Names of the files that hold elements of these tensors' boxes."""
    return {
        chunk.file
        for name, tensor in tensors.items()
        if name in manifest.tensors
        for chunk in manifest.tensors[name].chunks
        if chunk.pieces
        and any(
            overlap((chunk.offsets, chunk.sizes), (offsets, tuple(part.shape))) is not None
            for offsets, part in tensor.parts
        )
    }
