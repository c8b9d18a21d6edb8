"""Signals that ask to stop: before there is something to save, and after."""

import contextlib
import os
import signal
import time
from typing import NoReturn

import pytest

from gptpar.system import command_line, stop
from gptpar.system.stop import STOP_SIGNALS, Stopped, StopRequest, handling, stop_at_once


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_start_up_and_is_noted_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    expected = KeyboardInterrupt if number == signal.SIGINT else Stopped
    with pytest.raises(expected), StopRequest().listening():
        send(number)
    request = StopRequest()
    with request.listening():
        request.hold()
        send(number)
        send(signal.SIGTERM)
    assert request.signal == number and signal.getsignal(number) == before


def test_the_same_ctrl_c_may_come_twice_and_another_one_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = StopRequest()
    with pytest.raises(KeyboardInterrupt), request.listening():
        request.hold()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        now[0] += stop.SAME_REQUEST_SECONDS + 0.1
        assert request.signal == signal.SIGTERM
        send(signal.SIGINT)
        raise AssertionError("the second Ctrl-C was not heard")


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest()
        with request.listening():
            request.hold()
            send(signal.SIGHUP)
            assert request.signal is None
        with handling(stop_at_once):
            send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_in_start_up_is_not_lost_where_its_exception_is(number: signal.Signals) -> None:
    """An import may catch it, or make another error of it."""
    expected = KeyboardInterrupt if number == signal.SIGINT else Stopped
    request = StopRequest()
    with pytest.raises(expected), request.listening():
        try:
            send(number)
        except BaseException:
            raise ImportError("initialization failed") from None
    request = StopRequest()
    with pytest.raises(expected), request.listening():
        with contextlib.suppress(BaseException):
            send(number)
        request.hold()
        raise AssertionError("there is something to save now, and the request is forgotten")


def test_a_request_after_a_workers_run_changes_nothing() -> None:
    """It may come later to one worker than to the others, whose request has stopped this one's run."""

    def verb(argv: list[str]) -> int:
        with StopRequest().listening() as request:
            request.hold()
        send(signal.SIGTERM)
        return 0

    def end(status: int) -> NoReturn:
        send(signal.SIGTERM)
        raise SystemExit(status)

    assert command_line.run(verb, []) == 143
    with pytest.raises(SystemExit) as ended:
        command_line.run(verb, [], end)
    assert ended.value.code == 0
