"""The suite of injected faults: its kinds, its seeds, and what it disturbs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.hook import disturb
from tests.faults.table import KINDS, kind_of

# What a save does, as seen by the hook: open, write, fsync, rename; the open of another folder does not count.
WORK = """
import disturb, os
disturb.from_environment()
open("/dev/null", "w").close()
fd = os.open("run/a", os.O_WRONLY | os.O_CREAT)
os.write(fd, b"text")
os.fsync(fd)
os.rename("run/a", "run/iter_0000001")
print("done", flush=True)
"""


def test_every_kind_has_a_name_and_a_sentence() -> None:
    assert len({(kind.name, kind.workers) for kind in KINDS}) == len(KINDS) >= 25
    assert all(kind_of(kind.name, kind.workers) is kind and kind.inject.__doc__ for kind in KINDS)
    with pytest.raises(LookupError, match="no kind of faults meteor with 1 workers"):
        kind_of("meteor", 1)


@pytest.mark.parametrize(
    ("fault", "status", "left"),
    [
        ({"kill_at": 1}, -signal.SIGKILL, []),
        ({"kill_at": 4}, -signal.SIGKILL, ["a"]),
        ({"fail_at": 3, "errno": 28}, 1, ["a"]),
        ({"kill_at": 5}, 0, ["iter_0000001"]),
    ],
)
def test_a_process_is_disturbed_at_the_operation_that_was_named(
    fault: dict[str, int], status: int, left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    spec = json.dumps({"under": str(tmp_path / "run"), **fault})
    environment = {**os.environ, "PYTHONPATH": str(Path(disturb.__file__).parent), disturb.VARIABLE: spec}
    # -S: sitecustomize would install it a second time
    done = subprocess.run([sys.executable, "-S", "-c", WORK], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, sorted(os.listdir(tmp_path / "run"))) == (status, left), done.stderr
