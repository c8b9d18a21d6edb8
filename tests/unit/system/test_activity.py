"""What a dead worker was doing, and what a worker says that lost another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptpar.system import activity
from gptpar.system.activity import COUNTED_BYTES, Activity, LostRankError, SignsOfLife, last_activity

GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:29092: Connection reset by peer. This is typically"
NCCL = "NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.28\nncclRemoteError"


def test_a_killed_process_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activity.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    program = "import os; from gptpar.system.activity import Activity; a = Activity.of_worker()\n"
    program += "for i in range(1000): a.note(f'iteration {i}')\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL and last_activity(tmp_path, 1) == "iteration 999"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GLOO, "Read error [127.0.0.1]:29092: Connection reset by peer"),
        (NCCL, "NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.28"),
        ("Broken pipe", "Broken pipe"),  # the store's, while a group is made
        ("wait timeout after 600000ms, keys: /default_pg/0//cpu//1/0", None),
        ("Application timeout caused pair closure", None),  # gloo's, of a collective after the one that timed out
        ("Timed out waiting 6000ms for recv operation to complete", None),
    ],
)
def test_a_lost_rank_is_one_sentence(monkeypatch: pytest.MonkeyPatch, text: str, reason: str | None) -> None:
    monkeypatch.setattr(activity, "CULPRIT_FIRST_SECONDS", 0.0)
    worker = Activity(2)
    worker.note("iteration 5, summing gradients")
    with pytest.raises(LostRankError) as caught, worker.lost_ranks_explained():
        raise RuntimeError(text)
    reason = text if reason is None else reason
    expected = f"rank 2 lost another rank while it was at iteration 5, summing gradients; torch says: {reason}"
    assert str(caught.value) == expected


def shown_since(moment: float, signs: SignsOfLife, processes: list[int]) -> bool:
    """Whether a sign of life was shown after a moment of the monotonic clock."""
    silence = signs.silence(processes)
    return time.monotonic() - silence >= moment


def test_the_same_note_again_is_a_sign_of_life(tmp_path: Path) -> None:
    worker, signs = Activity(0, tmp_path), SignsOfLife(tmp_path)
    worker.note("evaluation")
    signs.silence([])
    time.sleep(0.1)
    assert signs.silence([]) >= 0.1
    moment = time.monotonic()
    worker.note("evaluation")
    assert shown_since(moment, signs, [])


def test_reading_much_is_a_sign_of_life_and_looking_at_a_file_is_none(tmp_path: Path) -> None:
    signs, file = SignsOfLife(tmp_path), tmp_path / "file"
    file.write_bytes(bytes(COUNTED_BYTES))
    signs.silence([os.getpid()])
    time.sleep(0.1)
    (tmp_path / "other").write_text("a sign that the folder's owner lives")
    assert signs.silence([os.getpid()]) >= 0.1
    moment = time.monotonic()
    file.read_bytes()
    assert shown_since(moment, signs, [os.getpid()])
