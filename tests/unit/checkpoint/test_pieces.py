"""Reading one ahead: in order, overlapped, and never more in memory than the largest one."""

from __future__ import annotations

import threading

import pytest

from gptpar.checkpoint.pieces import one_ahead
from gptpar.errors import CheckpointError


def test_the_next_is_read_meanwhile_if_both_are_no_more_than_the_largest() -> None:
    sizes = {"a": 3, "b": 7, "c": 10, "d": 1, "e": 9}
    begun = {name: threading.Event() for name in sizes}
    written: list[tuple[str, int]] = []
    ahead: dict[str, bool] = {}

    def read(name: str) -> int:
        begun[name].set()
        return sizes[name]

    def write(name: str, value: int) -> None:
        following = chr(ord(name) + 1)
        if following in sizes:
            together = sizes[name] + sizes[following] <= 10
            ahead[following] = begun[following].wait(10 if together else 0.05)
        written.append((name, value))

    one_ahead(sizes, read, write)
    assert written == list(sizes.items())
    assert ahead == {"b": True, "c": False, "d": False, "e": True}
    one_ahead({}, read, write)


@pytest.mark.parametrize("at", ["read", "write"])
def test_an_error_ends_it(at: str) -> None:
    def read(name: str) -> int:
        if at == "read" and name == "b":
            raise CheckpointError("damaged")
        return 1

    def write(name: str, value: int) -> None:
        if at == "write" and name == "a":
            raise CheckpointError("full")

    with pytest.raises(CheckpointError, match="damaged|full"):
        one_ahead({"a": 1, "b": 1, "c": 2}, read, write)
