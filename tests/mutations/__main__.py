"""Put each mutation of the table into a copy of this checkout, alone, and see whether the tests that it names notice.

    python -m tests.mutations                    all of them, after the same tests without any mutation
    python -m tests.mutations --only NAME ...    some of them
    python -m tests.mutations --fast             which of them the fast tier catches
    python -m tests.mutations --list             what there is

Prints a line for each mutation: which test caught it, how, and after how many seconds. Returns 1 if a mutation was not
caught, or if a test fails without any. It takes about 15 minutes of two cores and is therefore no part of the suite.
``tests/unit/repository/test_mutations.py`` is: it checks that each mutation still fits the code.

With ``--fast``, only tests of the fast tier run: those that a mutation names, then the unit tests of its package. It
returns 1 if they catch less than 70 % of the mutations.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.mutation import ROOT, Mutation
from tests.mutations.table import MUTATIONS

COPIED = ("gptpar", "csrc", "tests", "tools", "pyproject.toml", "README.md", "docs")
TIME_LIMIT_S = 600.0
FAILED = 1
"""Exit status of pytest where tests ran and some failed; all others say that the tests themselves could not run."""
FAST_SHARE = 0.7
"""The fast tier catches at least this fraction of the mutations."""


@dataclass(frozen=True)
class Verdict:
    """What the tests said.

    Attributes:
        status: pytest's exit status; ``None`` where it did not end in time.
        failure: id of the first test that failed, with its error; else the end of the output.
    """

    status: int | None
    failure: str
    seconds: float


def judge(tests: Sequence[str], mutation: Mutation | None, *, fast: bool = False) -> Verdict:
    """Run tests, or those of them in the fast tier, in a fresh copy of the checkout, with a mutation or with none."""
    with tempfile.TemporaryDirectory(prefix="gptpar-mutation-") as folder:
        copy = Path(folder)
        _copy_checkout(copy)
        if mutation is not None:
            mutation.inject(copy)
        return _run([*tests, "-m", "fast"] if fast else tests, copy)


def _copy_checkout(copy: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)


def _run(arguments: Sequence[str], copy: Path) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments]
    # The user's cache keeps compiled helpers by the hash of their source: a mutation in csrc is built anew.
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the processes that a test has started, too
        output, status = process.communicate()[0], None
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    last = output.strip().splitlines()[-1:]
    return Verdict(status, (failures or last or ["no output"])[0], time.monotonic() - started)


def _line(name: str, verdict: Verdict) -> str:
    test, _, error = verdict.failure.removeprefix("FAILED ").partition(" - ")
    return f"{name:50} {verdict.seconds:4.0f} s  {test}  {error[:100]}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(by_name), choices=list(by_name), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N")
    parser.add_argument("--fast", action="store_true", help="only tests of the fast tier; prints the share they catch")
    parser.add_argument("--list", action="store_true", help="print the mutations' names and files")
    args = parser.parse_args(argv)
    chosen = [by_name[name] for name in args.only]
    if args.list:
        print("\n".join(f"{mutation.name:50} {mutation.file}" for mutation in chosen))
        return 0
    if problems := [problem for mutation in chosen if (problem := mutation.problem())]:
        print("\n".join(problems))
        return 1
    tests = {mutation.name: [*mutation.tests, *(mutation.unit_tests() if args.fast else [])] for mutation in chosen}
    sound = judge(sorted({test for named in tests.values() for test in named}), None, fast=args.fast)
    print(_line("(no mutation)", sound), flush=True)
    if sound.status != 0:
        return 1
    missed = []
    with ThreadPoolExecutor(args.jobs) as pool:
        verdicts = pool.map(lambda mutation: judge(tests[mutation.name], mutation, fast=args.fast), chosen)
        for mutation, verdict in zip(chosen, verdicts, strict=True):
            print(_line(mutation.name, verdict), flush=True)
            if verdict.status != FAILED:
                missed.append(mutation.name)
    caught = 1 - len(missed) / len(chosen)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations ({caught:.0%}) were caught")
    print("".join(f"not: {name}\n" for name in missed), end="")
    return int(caught < (FAST_SHARE if args.fast else 1))


if __name__ == "__main__":
    raise SystemExit(main())
