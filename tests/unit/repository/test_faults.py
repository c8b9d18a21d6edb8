"""The table of faults fits the code: ``python -m tests.faults`` would inject each of them, and run tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.table import FAULTS


def test_every_fault_fits_the_code_once() -> None:
    assert not (problems := [problem for fault in FAULTS if (problem := fault.problem())]), "\n".join(problems)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").write_text("def test_a(): ...\n")

    def fault(file: str, right: str, test: str) -> Fault:
        return Fault("wrong-number", file, right, "= 2", (test,))

    fits = fault("code.py", "a = 1", "test_code.py::test_a[case]")
    for wrong, told in (
        (fault("other.py", "a = 1", "test_code.py"), "there is no other.py"),
        (fault("code.py", "= 1", "test_code.py"), "code.py holds '= 1' 2 times, not once"),
        (fault("code.py", "c = 1", "test_code.py"), "code.py holds 'c = 1' 0 times, not once"),
        (
            fault("code.py", "a = 1", "test_code.py::test_b"),
            "there is no test test_code.py::test_b",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            wrong.inject(tmp_path)
        assert str(caught.value) == f"fault wrong-number: {told}"
    fits.inject(tmp_path)
    assert (tmp_path / "code.py").read_text() == "= 2\nb = 1\n"


def test_unit_tests_of_a_fault_are_those_of_its_package() -> None:
    folders = {fault.file.split("/")[1]: fault.unit_tests() for fault in FAULTS if fault.file.startswith("gptpar/")}
    assert folders["engine"] == ["tests/unit/engine"]
    assert folders["tensor_parallel"] == []  # it computes between processes
    assert Fault("a-name", "csrc/cpu_adam.cpp", "a", "b", ("c",)).unit_tests() == []
