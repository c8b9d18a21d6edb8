"""Moving files between processes, block by block, over the process group that these have anyway."""

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
    """Copy files between the processes' folders; each takes two blocks of memory, however many files there are.

    Every process calls it with the same moves. Files get their names once all of all processes are there.

    Args:
        folder: this process's, from which it sends and into which it takes files.

    Raises:
        CheckpointError: on every process, if any could not read or write; nothing has come then.
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
    """Move all blocks of a process's files of one wave."""
    ends = [*sent, *taken]
    for start in range(0, max((end.move.num_bytes for end in ends), default=0), BLOCK_BYTES):
        # All are under way before any is waited for: in a ring everybody sends and takes.
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
    """One end of a file's way. After an error the blocks go on without the file: the other end waits for them."""

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
        """Begin to transfer the block at a place."""
        raise NotImplementedError

    def close(self) -> None:
        """No block is left."""
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
        """Write the block that has come."""
        if start >= self.move.num_bytes or self.error:
            return
        data, done = self._block(start).numpy().data, 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], start + done)
        except OSError as error:
            self._fail(error.strerror)

    def name(self) -> None:
        """Give the file its name."""
        os.replace(self._path, self._final)

    def forget(self) -> None:
        """Remove what has no name yet."""
        with suppress(OSError):  # it has, or there is none
            os.unlink(self._path)
