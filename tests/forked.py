"""Processes that start at once: forked from a server that has imported what tests import, and has computed nothing.

A process that has computed may have threads, which its forks lack; the server has none.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preloaded"])
