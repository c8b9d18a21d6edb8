"""An interpreter for scripts, whose programs are forks of a server that has imported torch and gptpar.

A new process takes seconds of a core for its imports. Which signals a program obeys, and what it does where its start
goes wrong, is tested with new processes.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.e2e import commands
from tests.forked import FORKED

ASKING = Path(__file__).with_name("asking.py")
FORK = multiprocessing.get_context("fork")


@contextmanager
def quick_python() -> Iterator[Path]:
    """An executable that takes ``-m gptpar VERB ...`` and ``FILE.py ...``, and starts a new Python for other words.

    A program gets the environment, the folder, stdout and stderr of who starts it. The gptpar that PYTHONPATH names
    first is the one that it imports.
    """
    with tempfile.TemporaryDirectory(prefix="gptpar-python-") as folder:
        address, executable = f"{folder}/socket", Path(folder, "python")
        words = [sys.executable, "-SE", ASKING, address, sys.executable, executable]
        executable.write_text(f'#!/bin/sh\nexec {" ".join(map(str, words))} "$@"\n')
        executable.chmod(0o755)
        ready, theirs = FORKED.Pipe()
        server = FORKED.Process(target=_serve, args=(address, theirs))
        server.start()
        theirs.close()
        ready.recv()
        try:
            yield executable
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.join()


def _serve(address: str, ready: Connection) -> None:
    os.setsid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.bind(address)
        asked.listen()
        ready.send(None)
        while True:
            connection, _ = asked.accept()
            with connection:
                FORK.Process(target=_answer, args=(connection,)).start()


def _answer(connection: socket.socket) -> None:
    """Run one program, and reply with its exit code; a program that nobody waits for any more is killed."""
    message, files, *_ = socket.recv_fds(connection, 2**20, 2)
    program = FORK.Process(target=_become, args=(json.loads(message), files))
    program.start()
    for file in files:
        os.close(file)
    if connection in wait([program.sentinel, connection]):
        program.kill()
    program.join()
    connection.send(str(program.exitcode).encode())


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Be the program that was asked for, in its environment and folder."""
    sys.executable = asked["executable"]
    paths = asked["environment"].get("PYTHONPATH", "").split(":")
    sys.path[:0] = paths
    if Path(paths[0], "gptpar").is_dir() and Path(paths[0]) != commands.ROOT:
        for name in [name for name in sys.modules if name.split(".")[0] == "gptpar" or name == commands.__name__]:
            del sys.modules[name]
    paths_of_files = [Path(f"/proc/self/fd/{file}") for file in files]
    run = importlib.import_module(commands.__name__)._run
    run(_run_words, asked["words"], paths_of_files, asked["environment"], asked["folder"])


def _run_words(words: list[str]) -> None:
    commands.customize()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        commands.run_program(words)
