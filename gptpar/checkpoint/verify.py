"""Verifies a checkpoint: reads every byte back from the disk and compares its CRC-32."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from gptpar.checkpoint.manifest import Chunk, DamagedCheckpoint, Manifest, read_manifest
from gptpar.checkpoint.pieces import ChunkFiles, run_parallel
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.tokenizer_copy import damaged_copy

Report = Callable[[str], None]


def verify_checkpoint(path: str | Path) -> list[str]:
    """Re-read every byte of one checkpoint.

    Args:
        path: a checkpoint directory.

    Returns:
        One sentence per problem, with file, tensor and bytes; if files are missing or of other sizes, of these alone.
        Empty if the checkpoint is whole.
    """
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return [str(error)]
    return damaged_files(Path(path), manifest) or damaged_pieces(Path(path), manifest)


def report_all(report: Report, sentences: list[str]) -> None:
    for sentence in sentences:
        report(sentence)


def damaged_files(path: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or of the wrong size, found without reading them."""
    problems = []
    for name, size in sorted(manifest.file_sizes().items()):
        try:
            found = os.stat(path / name).st_size
        except OSError as error:
            problems.append(f"{path / name} cannot be opened: {error.strerror}")
            continue
        if found > size:
            problems.append(f"{path / name} has {found:,} bytes and should have {size:,}")
        elif found < size:
            tensor, chunk = min(
                ((t, c) for t, c in _chunks(manifest) if c.file == name and c.stop > found),
                key=lambda pair: pair[1].start,
            )
            problems.append(
                f"{path / name} ends at byte {found:,} of {size:,}: tensor {tensor!r} "
                f"(bytes {chunk.start}..{chunk.stop}) and what follows are lost"
            )
    return problems


def damaged_pieces(
    path: Path, manifest: Manifest, share: int = 0, num_shares: int = 1, moved: Callable[[], None] = lambda: None
) -> list[str]:
    """Pieces, and files of a tokenizer, that are not what was saved; ranks that check together take a share each.

    Args:
        moved: is called after each piece.
    """
    chunks = [(name, chunk) for name, chunk in _chunks(manifest) if chunk.pieces][share::num_shares]
    try:
        with ChunkFiles(path, from_disk=True) as files:
            files.open({chunk.file for _, chunk in chunks})
            found = run_parallel([partial(_check_chunk, files, name, chunk, moved) for name, chunk in chunks])
    except DamagedCheckpoint as error:
        return [str(error)]
    copied = [] if share else damaged_copy(path, manifest.meta)
    return copied + [problem for problems in found for problem in problems]


def sound_files(path: Path, manifest: Manifest, names: Collection[str]) -> tuple[set[str], list[str]]:
    """Find the files of a checkpoint that are there with the bytes that were saved.

    Returns:
        (their names, a sentence for each other one that is there)
    """
    problems: dict[str, str] = {}
    with ChunkFiles(path) as files:
        there = {name for name in names if os.path.isfile(path / name)}
        for name in sorted(there):
            try:
                files.open({name})
            except DamagedCheckpoint as error:
                problems[name] = str(error)
        opened = there - problems.keys()
        chunks = [(name, chunk) for name, chunk in _chunks(manifest) if chunk.pieces and chunk.file in opened]
        found = run_parallel([partial(_check_chunk, files, name, chunk, lambda: None) for name, chunk in chunks])
    for (_, chunk), sentences in zip(chunks, found, strict=True):
        if sentences:
            problems.setdefault(chunk.file, sentences[0])
    return there - problems.keys(), [problems[name] for name in sorted(problems)]


def damaged_on_any_rank(ranks: Ranks, path: Path, manifest: Manifest) -> list[str]:
    """Find damaged pieces, each rank reading a part of the checkpoint; every rank gets all problems."""
    shares = ranks.each(lambda: damaged_pieces(path, manifest, ranks.rank, ranks.world_size, ranks.moved))
    return [problem for share in shares for problem in share]


def _check_chunk(files: ChunkFiles, name: str, chunk: Chunk, moved: Callable[[], None]) -> list[str]:
    problems = []
    for index in range(len(chunk.pieces)):
        try:
            with files.read(name, chunk, index):
                pass
        except DamagedCheckpoint as error:
            problems.append(str(error))
        moved()
    return problems


def _chunks(manifest: Manifest) -> list[tuple[str, Chunk]]:
    return [(name, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
