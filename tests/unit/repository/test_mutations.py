"""The table of mistakes fits the code: ``python -m tests.mutations`` would inject each, and run tests that exist."""

from tests.mutations.table import MUTATIONS


def test_every_mutation_fits_the_code_once() -> None:
    assert not (problems := [problem for mutation in MUTATIONS if (problem := mutation.problem())]), "\n".join(problems)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
