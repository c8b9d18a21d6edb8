"""``gptpar doctor``: each line is ok, or warns with an advice; the exit code says whether all are ok."""

import json
from pathlib import Path

import pytest

from gptpar.cli import doctor


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is slow or short."""
    for name in ("MIN_COPY", "MIN_DISK_RATE", "MIN_SHARED", "MIN_MEMORY", "MIN_DISK"):
        monkeypatch.setattr(doctor, name, 0)


def found(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    status = doctor.main(["--folder", str(folder), "--mib", "1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (status == 0)
    return status, told["findings"]


@pytest.mark.slow
def test_a_good_machine_is_told_in_one_screen(
    fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "core_quota", lambda: None)
    status = doctor.main(["--folder", str(tmp_path), "--mib", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, lines
    assert len(lines) <= 24 and all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == f"all {len(lines) - 1} lines are ok"
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_and_a_folder_that_is_not_there_warn(
    fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK_RATE", 1e15)
    status, findings = found(tmp_path, capsys)
    assert status == 1 and not findings["disk write"]["ok"] and "--save-local" in str(findings["disk write"]["advice"])
    status, findings = found(tmp_path / "no", capsys)
    assert status == 1 and "cannot be written" in str(findings["disk write"]["text"])
