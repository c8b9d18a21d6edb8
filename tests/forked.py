"""Processes for tests that start quickly: they are forked from a server that has imported the tests' modules.

The server computes nothing, so it has no threads. A process that has computed may have threads, which its forks lack.
"""

import multiprocessing
import os

START = os.environ.get("TESTS_START", "forkserver")
"""``spawn`` starts a new interpreter for each process, with its own hash seed, as torchrun does."""

FORKED = multiprocessing.get_context(START)


def preload(*modules: str) -> None:
    """Let the server import these modules, where they are installed, and then the tests'."""
    if START == "forkserver":
        FORKED.set_forkserver_preload([*modules, "tests.preloaded"])


preload()
