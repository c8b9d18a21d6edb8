"""Calls that a few threads divide: their results in order, and what an error leaves out."""

from __future__ import annotations

import threading

import pytest

from gptpar.checkpoint.pieces import NUM_THREADS, run_parallel


def test_results_come_in_the_order_of_the_calls() -> None:
    together = threading.Barrier(NUM_THREADS)

    def call(number: int) -> int:
        if number < NUM_THREADS:
            together.wait(60)  # each thread has one
        return number * number

    assert run_parallel([lambda number=number: call(number) for number in range(100)]) == [n * n for n in range(100)]
    assert run_parallel([]) == []


@pytest.mark.parametrize("error", [ValueError("third"), KeyboardInterrupt()])
def test_after_an_error_no_further_call_begins(error: BaseException) -> None:
    begun, failed = list[int](), threading.Event()

    def call(number: int) -> None:
        begun.append(number)
        if number == 2:
            failed.set()
            raise error
        failed.wait(60)
        threading.Event().wait(0.2)  # until the error is noticed

    with pytest.raises(type(error)):
        run_parallel([lambda number=number: call(number) for number in range(100)])
    assert 3 <= len(begun) <= 2 * NUM_THREADS
