"""A pool of threads or processes that returns results in order, in bounded memory, and always ends its workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from gptpar.errors import DataError
from gptpar.system.stop import handling

Item = TypeVar("Item")
Result = TypeVar("Result")

PENDING_PER_WORKER = 3  # enough that no worker waits while the oldest result is being written


@contextmanager
def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, *, threads: bool = False
) -> Iterator[Iterator[Result]]:
    """``map(function, items)`` over ``workers`` processes (1: this one), with the results in order.

    At most PENDING_PER_WORKER items per worker are read in advance. The end of the block ends the workers, whatever its
    reason; if this process is killed, they notice that and end.

    Args:
        threads: whether to use threads, which start at once and copy nothing; for a function that releases Python's
            lock for most of its time.

    Raises:
        DataError: a worker died.
    """
    if workers == 1:
        yield map(function, items)
        return
    # spawn: a forked child would inherit locks that threads hold which it does not have
    spawn = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(workers) if threads else ProcessPoolExecutor(workers, spawn, _start_worker)
    try:
        yield _results(pool, function, items, PENDING_PER_WORKER * workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], limit: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= limit:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely killed for lack of memory; use fewer --workers or shorter documents"
        ) from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the group; the parent ends these
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def terminate_cleanly() -> AbstractContextManager[None]:
    """Within the block SIGTERM raises SystemExit(143), so that temporary files and workers are cleaned up."""
    return handling(lambda *_: sys.exit(143), [signal.SIGTERM])
