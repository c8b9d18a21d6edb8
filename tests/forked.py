"""Processes that start at once: forked from a server that has imported what tests import, and has computed nothing.

A process that has computed may have threads, which its forks lack; the server has none.
"""

from __future__ import annotations

import multiprocessing
import os

START = os.environ.get("TESTS_START", "forkserver")
"""``spawn``: each process is an interpreter of its own, with its own seed of hashes, as under torchrun."""

FORKED = multiprocessing.get_context(START)
if START == "forkserver":
    FORKED.set_forkserver_preload(["tests.preloaded"])
