"""Starts workers on several machines by torchrun in this process; the relay takes torchrun's signals."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.worker import LAUNCHER_VARIABLE
from gptpar.errors import GptparError, first_line
from gptpar.system.activity import FOLDER_VARIABLE
from gptpar.system.interfaces import is_own_address
from gptpar.system.restart import MEMORY_VARIABLE, SHARES_NO_STORE, VARIABLE
from gptpar.system.stop import Stopped

READ_SECONDS = 900
"""The longest wait of torchrun for an answer from the rendezvous's host; Linux then gives the connection up."""

JOIN_SECONDS = 1800
"""The longest wait of torchrun for all machines: longer than a cut network, and workers that time out by it."""


def run_torchrun(words: argparse.Namespace, folder: Path, memory: Path | None) -> Failure | None:
    """Run torchrun with its flags; returns the worker that failed first, if one did.

    Args:
        folder: for the workers' records of activity.
        memory: a folder in this machine's memory for the workers; ``None``: there is none.

    Raises:
        GptparError: the machines did not meet.
        Stopped: a signal that is not relayed ended it.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher import api
    from torch.distributed.run import run

    from gptpar.cli.launch.agent import Agent, ReportingRendezvous

    # The worker itself and the launcher say what went wrong; torchrun's own report would bury both messages.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    where = words.rdzv_endpoint or f"{words.master_addr}:{words.master_port}"
    conf = {**_conf_of(words, where), **dict(word.split("=", 1) for word in words.rdzv_conf.split(",") if "=" in word)}
    words.rdzv_conf = ",".join(f"{key}={value}" for key, value in conf.items())
    rendezvous = partial(
        ReportingRendezvous,
        machines=f"the {words.nnodes} machines of this run, which meet at {where} (at most {conf['join_timeout']} s)",
        answer=f"an answer from {where} (at most {conf['read_timeout']} s): is the network up?",
    )
    failures: list[Failure] = []
    words.signals_to_handle = "SIGQUIT"  # the others are the relay's; torchrun wants at least one
    words.log_dir = words.log_dir or str(folder / "torchrun")
    try:
        agent = partial(Agent, folder=folder, failed=failures.append, rendezvous=rendezvous)
        with _variables_of_workers(folder, memory), patch.object(api, "LocalElasticAgent", agent):
            run(words)
    except ChildFailedError:
        return failures[-1]
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    except RendezvousClosedError:
        raise GptparError(
            f"the run at {where} has ended on another machine; its launcher says why: start it again on all machines, "
            "with another --rdzv-id if its host still runs."
        ) from None
    except (DistError, RendezvousError, socket.gaierror) as error:
        raise GptparError(
            f"the machines did not meet at {where} ({first_line(error.__cause__ or error)}): see that the first one "
            "runs and can be reached there, and that no other program has this port (else choose another one); where a "
            "machine's own name means 127.0.1.1, give --local-addr its address in the network."
        ) from error
    return None


def _conf_of(words: argparse.Namespace, where: str) -> dict[str, str]:
    """torchrun's settings of a rendezvous that outlasts a network cut, and finds its host where torch would not."""
    conf = {"join_timeout": str(JOIN_SECONDS), "read_timeout": str(READ_SECONDS)}
    if words.rdzv_backend == "static":
        return {**conf, "timeout": str(READ_SECONDS)}
    host, _, port = where.rpartition(":")
    # torch asks whether the address is that of this machine's name, which may mean 127.0.1.1.
    return {**conf, "is_host": "1"} if port.isdecimal() and is_own_address(host, int(port)) else conf


@contextlib.contextmanager
def _variables_of_workers(folder: Path, memory: Path | None) -> Iterator[None]:
    """Set variables in the environment, which workers inherit."""
    variables = {FOLDER_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(os.getpid())}
    variables |= {} if memory is None else {MEMORY_VARIABLE: str(memory)}
    # In a store that outlives the workers the next ones would find the addresses of the dead.
    variables[SHARES_NO_STORE] = "1"
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in (*variables, VARIABLE):
            os.environ.pop(name, None)
