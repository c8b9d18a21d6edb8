"""The end of a process waits for threads that run outside of Python's lock."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gptpar.system import quiet_end

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not tell threads' states"),
]


def test_waits_for_a_thread_without_pythons_lock() -> None:
    ended = threading.Event()

    def work() -> None:
        hashlib.sha256(bytes(40 << 20)).digest()  # releases the lock
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    quiet_end.quiet_threads()
    assert ended.is_set()
    thread.join()


def test_the_end_of_a_process_waits_and_keeps_its_status() -> None:
    program = (
        "import sys; from gptpar.system import quiet_end; quiet_end.wait_at_exit(); quiet_end.wait_at_exit()\n"
        "import atexit; atexit.register(lambda: print('asked'))\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "asked\n")
