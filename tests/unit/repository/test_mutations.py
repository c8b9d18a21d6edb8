"""The table of mistakes fits the code: ``python -m tests.mutations`` would inject each, and run tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS


def test_every_mutation_fits_the_code_once() -> None:
    assert not (problems := [problem for mutation in MUTATIONS if (problem := mutation.problem())]), "\n".join(problems)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").write_text("def test_a(): ...\n")

    def mutation(file: str, right: str, test: str) -> Mutation:
        return Mutation("wrong-number", file, right, "= 2", (test,))

    fits = mutation("code.py", "a = 1", "test_code.py::test_a[case]")
    for wrong, told in (
        (mutation("other.py", "a = 1", "test_code.py"), "there is no other.py"),
        (mutation("code.py", "= 1", "test_code.py"), "code.py holds '= 1' 2 times, not once"),
        (mutation("code.py", "c = 1", "test_code.py"), "code.py holds 'c = 1' 0 times, not once"),
        (
            mutation("code.py", "a = 1", "test_code.py::test_b"),
            "there is no test test_code.py::test_b",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            wrong.inject(tmp_path)
        assert str(caught.value) == f"mutation wrong-number: {told}"
    fits.inject(tmp_path)
    assert (tmp_path / "code.py").read_text() == "= 2\nb = 1\n"
