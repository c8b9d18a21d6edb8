"""Both rules for cutting a corpus, on the values checked against the originals."""

import pytest

from gptpar.data.splits import parse_split
from gptpar.errors import DataError


@pytest.mark.parametrize(
    "text, count, mcore, legacy",
    [
        ("949,50,1", 50, [(0, 47), (47, 50), (50, 50)], [(0, 48), (48, 50), None]),
        ("90,5,5", 10, [(0, 9), (9, 10), (10, 10)], [(0, 10), None, None]),
        ("0,1,0", 5, [None, (0, 5), None], [None, (0, 5), None]),
        ("'969, 30, 1'", 1000, [(0, 969), (969, 999), (999, 1000)], [(0, 969), (969, 999), (999, 1000)]),
        ("0.5/0.25/0.25", 4, [(0, 2), (2, 3), (3, 4)], [(0, 2), (2, 3), (3, 4)]),
        ("1,1,0", 5, [(0, 2), (2, 5), None], [(0, 3), (3, 5), None]),  # 2.5 rounds to the even 2
        ("0,1,1", 3, [None, (0, 2), (2, 3)], [None, (0, 1), (1, 3)]),  # legacy would start at -1
    ],
)
def test_both_rules(text: str, count: int, mcore: list, legacy: list) -> None:
    assert list(parse_split(text, count)) == mcore
    assert list(parse_split(text, count, "legacy")) == legacy


NONSENSE = ["", "0,0,0", "1,2,3,4", "-1,2", "1e3,1", "\u0661,1"]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="must be one to three numbers"):
        parse_split(text, 10)
