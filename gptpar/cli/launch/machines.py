"""Starts workers on several machines by torchrun in this process; the relay takes torchrun's signals."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.worker import LAUNCHER_VARIABLE
from gptpar.errors import GptparError
from gptpar.system.activity import FOLDER_VARIABLE, last_activity
from gptpar.system.restart import MEMORY_VARIABLE, SHARES_NO_STORE
from gptpar.system.stop import Stopped


def run_torchrun(words: argparse.Namespace, folder: Path, memory: Path | None) -> Failure | None:
    """Run torchrun with its flags; returns the worker that failed first, if one did.

    Args:
        folder: for the workers' records of activity.
        memory: a folder in this machine's memory for the workers; ``None``: they are told of none.

    Raises:
        GptparError: the machines did not meet.
        Stopped: a signal that is not relayed ended it.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    # The worker itself and the launcher say what went wrong; torchrun's own report would bury both messages.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    words.signals_to_handle = "SIGQUIT"  # the others are the relay's; torchrun wants at least one
    words.log_dir = words.log_dir or str(folder / "torchrun")
    try:
        with _told_to_workers(folder, memory):
            run(words)
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        return Failure(rank, failed.exitcode, last_activity(folder, rank))
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    except (DistError, RendezvousError) as error:
        where = words.rdzv_endpoint or f"{words.master_addr}:{words.master_port}"
        raise GptparError(
            f"the machines did not meet at {where} ({str(error).splitlines()[0]}): see that the first machine runs "
            "and can be reached there, and that no other program has this port (else choose another MASTER_PORT)."
        ) from error
    return None


@contextlib.contextmanager
def _told_to_workers(folder: Path, memory: Path | None) -> Iterator[None]:
    """They inherit the environment."""
    told = {FOLDER_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(os.getpid())}
    told |= {} if memory is None else {MEMORY_VARIABLE: str(memory)}
    # In a store that outlives the workers the next ones would find the addresses of the dead.
    told[SHARES_NO_STORE] = "1"
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]
