"""``--workers N``: tests run in N forks of the process that has imported and collected them, which so is done once.

A worker takes one file of tests after the other. It has no threads yet, and so has the server that is forked from it.
"""

import itertools
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests.forked import begin_server, can_fork, import_preloaded


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, metavar="N", help="run tests in N forks, where torch sees no GPU"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if option.collectonly or session.testsfailed:
        return None
    if not option.workers or not can_fork():
        begin_server()
        return None
    import_preloaded()
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all workers
    numbered = itertools.groupby(enumerate(session.items), lambda pair: pair[1].path)
    waiting = [[number for number, _ in pairs] for _, pairs in numbered][::-1]
    workers: list[Worker] = []
    try:
        while workers or waiting:
            workers += [Worker(session) for _ in range(min(option.workers - len(workers), len(waiting)))]
            for pipe in wait([worker.pipe for worker in workers]):
                (worker,) = (worker for worker in workers if worker.pipe is pipe)
                if not worker.take(waiting):
                    workers.remove(worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in workers:
            worker.kill()
    return True


class Worker:
    """A fork that runs tests, as the process sees it that has forked it."""

    def __init__(self, session: pytest.Session):
        self._session = session
        self._left: list[int] = []  # numbers of tests that it was given and has not started
        self._running: dict[str, Any] | None = None
        self.pipe, theirs = Pipe()
        self._pid = os.fork()
        if not self._pid:
            self.pipe.close()
            _work(session, theirs)
        theirs.close()

    def take(self, waiting: list[list[int]]) -> bool:
        """Pass on what it reports, or give it the last of the files that wait; False: it has ended."""
        try:
            name, given = self.pipe.recv()
        except EOFError:
            self._end(waiting)
            return False
        if name == "wants":
            self._left += (file := waiting.pop() if waiting else [])
            self.pipe.send(file)
            return True
        if name == "logstart":
            self._running = given
            self._left.pop(0)
        elif name == "logfinish":
            self._running = None
        self._report(name, given)
        return True

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _end(self, waiting: list[list[int]]) -> None:
        _, status = os.waitpid(self._pid, 0)
        if self._running is not None:  # it died
            died = f"its worker ended with status {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(**self._running, keywords={}, outcome="failed", longrepr=died, when="call")
            hook = self._session.config.hook
            self._report("logreport", {"report": hook.pytest_report_to_serializable(config=hook, report=report)})
        if self._left:
            waiting.append(self._left)

    def _report(self, name: str, given: dict[str, Any]) -> None:
        config = self._session.config
        if name == "logreport":
            given = {"report": config.hook.pytest_report_from_serializable(config=config, data=given["report"])}
        getattr(config.hook, f"pytest_runtest_{name}")(**given)


class _Sender:
    """Takes the place of what reports to the terminal."""

    def __init__(self, config: pytest.Config, pipe: Connection):
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._pipe.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._pipe.send(("logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("logreport", {"report": data}))


def _work(session: pytest.Session, pipe: Connection) -> None:
    """In the child: run tests until no file is left, and exit."""
    status = 70
    try:
        config = session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of all workers
        capture.start_global_capturing()
        begin_server()
        capture.suspend_global_capture()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Sender(config, pipe))
        mine = (session.items[number] for number in _given(pipe))
        for item, following in itertools.pairwise(itertools.chain(mine, [None])):
            assert item is not None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        status = 0
    finally:
        os._exit(status)


def _given(pipe: Connection) -> Iterator[int]:
    while True:
        pipe.send(("wants", None))
        if not (numbers := pipe.recv()):
            return
        yield from numbers
