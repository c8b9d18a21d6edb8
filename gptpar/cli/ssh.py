"""Runs commands on several machines through ssh, and stops them together.

ssh does not pass on signals. So each machine reads names of signals from the stdin of its ssh, one a line, and sends
them to its command. When that input ends, because the connection is lost or this process dies, the machine's run saves
and stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from gptpar.errors import GptparError
from gptpar.system.stop import handling

PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "GPTPAR_STOP_SECONDS", "PYTHONPATH", "OMP_NUM_THREADS")
"""Prefixes of the environment variables that all machines get."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that a shell accepts for variables; it would run parts of other names as commands."""
POLL_SECONDS = 0.1
_LISTENING = (
    ' </dev/null & child=$!; exec 3<&0; { while read -r word <&3; do kill -"$word" $child; done; kill -TERM $child; }'
    " >/dev/null 2>&1 & watcher=$!; wait $child; code=$?; kill $watcher 2>/dev/null; exit $code; }"
)
"""Shell text behind a command: words of stdin become signals to it, and the shell exits with its exit code."""


def remote_command(words: Sequence[str], visible: str, environment: Mapping[str, str], folder: str) -> str:
    """The command that ssh runs: ``gptpar launch`` in a folder, with this machine's Python and some of its variables.

    Args:
        words: arguments of ``gptpar launch``.
        visible: the GPUs to use, in the form of CUDA_VISIBLE_DEVICES.
        environment: this machine's variables. PYTHON names another Python; variables of ``PASSED_ON`` are passed on.
        folder: the folder on the other machine.
    """
    variables = {"PYTHON": environment.get("PYTHON", sys.executable)}
    passed = {name: value for name, value in sorted(environment.items()) if name.startswith(PASSED_ON)}
    variables |= {name: value for name, value in passed.items() if _NAME.fullmatch(name)}
    exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    launch = f'CUDA_VISIBLE_DEVICES={shlex.quote(visible)} "$PYTHON" -m gptpar launch {shlex.join(words)}'
    script = f"cd {shlex.quote(folder)} && export {exported} && {{ {launch}{_LISTENING}"
    return f"bash -c {shlex.quote(script)}"  # whatever the login shell is


def ssh_words(environment: Mapping[str, str], port: int | None = None) -> list[str]:
    """The command that reaches a machine: the variable SSH, by default ``ssh``, set to ask no questions."""
    at_port = [] if port is None else ["-p", str(port)]
    return [*shlex.split(environment.get("SSH", "ssh")), "-o", "BatchMode=yes", *at_port]


def run_on_hosts(ssh: Sequence[str], commands: Mapping[str, str]) -> int:
    """Run a command on each host until all have ended; each line of output begins with the host's name.

    A request to stop is passed on, and so is a second Ctrl-C. If a host fails, the others are stopped.

    Returns:
        The exit code of the first host that failed; else 128 plus the number of the signal that stopped all; else 0.

    Raises:
        GptparError: ssh cannot be started.
    """
    hosts = _Hosts()
    with handling(hosts.on_signal):
        try:
            for host, command in commands.items():
                hosts.start(host, [*ssh, host, command])
        except OSError as error:
            hosts.signal_all("TERM")
            hosts.wait()
            raise GptparError(f"{ssh[0]} cannot be started ({error.strerror}): install it, or set SSH.") from None
        return hosts.wait()


class _Hosts:
    """The ssh process of each host."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._stopped = 0

    def start(self, host: str, words: Sequence[str]) -> None:
        """Start ssh in a session of its own. A terminal's Ctrl-C reaches only this process, which passes it on once."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0, start_new_session=True
        )
        self._processes[host] = process
        self._readers.append(threading.Thread(target=_copy, args=(host, process), daemon=True))
        self._readers[-1].start()
        if self._stopped:  # the request came before this host started
            self._signal(process, "TERM")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on: the first lets all hosts save; a later Ctrl-C stops them at once."""
        if not self._stopped:
            self._stopped = 128 + number
            _say("stopping all hosts; each saves first")
            self.signal_all("TERM")
        elif number == signal.SIGINT:
            _say("stopping all hosts at once")
            self.signal_all("INT")

    def signal_all(self, word: str) -> None:
        for process in list(self._processes.values()):
            self._signal(process, word)

    def wait(self) -> int:
        """Wait until all hosts have ended and their output is shown; returns the exit code."""
        failed, status, running = "", 0, dict(self._processes)
        while running:
            for host, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[host]
                code = 128 - code if code < 0 else code
                if code and not status and not (self._stopped and code > 128):
                    failed, status = host, code
                    self.signal_all("TERM")
            time.sleep(POLL_SECONDS if running else 0.0)
        for reader in self._readers:
            reader.join()
        if status:
            others = "; the other hosts were stopped" if len(self._processes) > 1 else ""
            _say(f"error: {failed} ended with exit code {status}{others}")
        return status or self._stopped

    def _signal(self, process: subprocess.Popen[bytes], word: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the host has ended
            os.write(process.stdin.fileno(), f"{word}\n".encode())


def _copy(host: str, process: subprocess.Popen[bytes]) -> None:
    """Show a host's output line by line. If the terminal is gone, still read it, so that the host does not block."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            sys.stdout.write(f"{host}: {line.decode(errors='replace')}")
            sys.stdout.flush()


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)
