"""Copies files between processes, block by block, over the process group that they already have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.ring import Move, waves
from gptpar.errors import CheckpointError
from gptpar.system.files import temporary_name

BLOCK_BYTES = 8 << 20


def move_files(ranks: Ranks, moves: Sequence[Move], folder: Path) -> None:
    """Copy files between the processes' folders; a process needs memory for two blocks, however many files there are.

    Every process calls this function with the same moves. The files get their final names only once every process has
    received all of its files.

    Args:
        folder: this process's folder, for the files it sends and for those it receives.

    Raises:
        CheckpointError: on every process, if any process could not read or write. No file has its final name then,
            unless a renaming failed.
    """
    problems: list[str] = []
    come: list[_Incoming] = []
    try:
        for wave in waves(moves):
            sent = [_Outgoing(move, folder) for move in wave if move.source == ranks.rank]
            taken = [_Incoming(move, folder) for move in wave if move.target == ranks.rank]
            come += taken
            _transfer(sent, taken, ranks)
            problems += [end.error for end in (*sent, *taken) if end.error]
        ranks.each(lambda: _refuse(problems))
        ranks.each(lambda: _name(come))
    finally:
        for one in come:
            one.forget()


def _transfer(sent: list[_Outgoing], taken: list[_Incoming], ranks: Ranks) -> None:
    """Transfer all blocks of the files that this process sends and receives in one wave."""
    ends = [*sent, *taken]
    for start in range(0, max((end.move.num_bytes for end in ends), default=0), BLOCK_BYTES):
        # Begin all before waiting for any: in a ring each process sends and receives.
        requests = [end.begin(start, ranks.group) for end in ends if start < end.move.num_bytes]
        for request in requests:
            request.wait()
        for one in taken:
            one.keep(start)
        ranks.moved()
    for end in ends:
        end.close()


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("; ".join(problems))


def _name(come: list[_Incoming]) -> None:
    for one in come:
        one.name()


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a process outside the group"
    return work


class _End:
    """One end of a move. After an error it still transfers blocks, without the file: the other end waits for them."""

    flags = 0

    def __init__(self, move: Move, path: Path):
        self.move, self.error = move, ""
        self._path, self._fd = path, -1
        self._buffer = torch.empty(min(BLOCK_BYTES, move.num_bytes), dtype=torch.uint8)
        try:
            self._fd = os.open(path, self.flags, 0o600)
        except OSError as error:
            self._fail(error.strerror)

    def _fail(self, reason: str | None) -> None:
        self.error = self.error or f"{self._path}: {reason}"

    def _block(self, start: int) -> torch.Tensor:
        return self._buffer[: self.move.num_bytes - start]

    def begin(self, start: int, group: dist.ProcessGroup | None) -> dist.Work:
        """Begin to transfer the block that starts at byte ``start``."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the buffer and close the file, after the last block."""
        del self._buffer
        if self._fd >= 0:
            os.close(self._fd)


class _Outgoing(_End):
    flags = os.O_RDONLY

    def __init__(self, move: Move, folder: Path):
        super().__init__(move, folder / move.name)

    def begin(self, start: int, group: dist.ProcessGroup | None) -> dist.Work:
        block, done = self._block(start), 0
        while not self.error and done < len(block):
            try:
                count = os.preadv(self._fd, [block.numpy().data[done:]], start + done)
            except OSError as error:
                self._fail(error.strerror)
                break
            done += count
            if not count:
                self._fail(f"it ends at byte {start + done:,} of {self.move.num_bytes:,}")
        return _under_way(dist.isend(block, self.move.target, group=group))


class _Incoming(_End):
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

    def __init__(self, move: Move, folder: Path):
        self._final = folder / move.name
        super().__init__(move, temporary_name(self._final))

    def begin(self, start: int, group: dist.ProcessGroup | None) -> dist.Work:
        return _under_way(dist.irecv(self._block(start), self.move.source, group=group))

    def keep(self, start: int) -> None:
        """Write the block that was received."""
        if start >= self.move.num_bytes or self.error:
            return
        data, done = self._block(start).numpy().data, 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], start + done)
        except OSError as error:
            self._fail(error.strerror)

    def name(self) -> None:
        """Give the file its final name."""
        os.replace(self._path, self._final)

    def forget(self) -> None:
        """Remove the file if it has no final name yet."""
        with suppress(OSError):  # it has its final name, or was never made
            os.unlink(self._path)
