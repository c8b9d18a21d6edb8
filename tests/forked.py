"""Processes for tests that start quickly: they are forked from a server that has imported the tests' modules.

The server computes nothing, so it has no threads. A process that has computed may have threads, which its forks lack.
"""

import faulthandler
import importlib
import multiprocessing
import os
import socket
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import connection, forkserver

START = os.environ.get("TESTS_START", "forkserver")
"""``spawn`` starts a new interpreter for each process, with its own hash seed, as torchrun does."""

FORKED = multiprocessing.get_context(START)
PRELOADED = ["tests.preloaded"]
FORKED.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Let the server import these modules, where they are installed, before the tests'."""
    PRELOADED[:0] = modules


def can_fork() -> bool:
    """Neither threads of this process stand against a fork, nor a GPU, which its forks could not use."""
    import torch

    return threading.active_count() == 1 and not torch.cuda.is_available()


def import_preloaded() -> bool:
    """Import what the server has imported, if tests need it and it can be forked from this process."""
    users = {"tests.spawn", "tests.e2e.commands"}
    if START != "forkserver" or not users & sys.modules.keys() or not can_fork():
        return False
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    return True


def begin_server() -> None:
    """Fork the server from this process, which has computed nothing yet; without this, it is a new interpreter."""
    if not import_preloaded():
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address := connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    alive, ours = os.pipe()
    if not (pid := os.fork()):
        try:
            os.close(ours)
            faulthandler.disable()  # pytest's writes into the terminal
            weakref.finalize._registry.clear()  # temporary folders are this process's to remove
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
