"""Put each mutation of the table into a copy of this checkout, alone, and see whether the tests that it names notice.

    python -m tests.mutations                    all of them, after the same tests without any mutation
    python -m tests.mutations --only NAME ...    some of them
    python -m tests.mutations --fast             which of them the fast tier catches
    python -m tests.mutations --list             what there is

Prints a line for each mutation: which test caught it, how, and after how many seconds. Returns 1 if a mutation was not
caught, or if a test fails without any. It takes about 40 minutes of two cores and is therefore no part of the suite.
``tests/unit/repository/test_mutations.py`` is: it checks that each mutation still fits the code.

With ``--fast``, only tests of the fast tier run: those that a mutation names, then the unit tests of its package. It
returns 1 if they catch less than 70 % of the mutations.
"""

import argparse
import os
from collections.abc import Sequence

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # before numpy and torch: a process with threads cannot be forked

from gptpar.system.limits import usable_cores  # noqa: E402
from tests.mutations.judge import Task, Verdict, judge_all, preload  # noqa: E402
from tests.mutations.table import MUTATIONS  # noqa: E402

FAILED = 1
"""Exit status of pytest where tests ran and some failed; all others say that the tests themselves could not run."""
FAST_SHARE = 0.7
"""The fast tier catches at least this fraction of the mutations."""


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
    parser.add_argument("--jobs", type=int, default=max(1, usable_cores() // 2), metavar="N")
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
    tier = ["-m", "fast"] if args.fast else []
    tests = {mutation.name: [*mutation.tests, *(mutation.unit_tests() if args.fast else [])] for mutation in chosen}
    preload()
    every_test = sorted({test for named in tests.values() for test in named})
    [(_, sound)] = judge_all([Task(None, [*every_test, *tier], limit_s=3600.0)], 1)
    print(_line("(no mutation)", sound), flush=True)
    if sound.status != 0:
        return 1
    missed = []
    tasks = [Task(mutation, [*tests[mutation.name], *tier]) for mutation in chosen]
    for task, verdict in judge_all(tasks, args.jobs):
        assert task.mutation is not None
        print(_line(task.mutation.name, verdict), flush=True)
        if verdict.status != FAILED:
            missed.append(task.mutation.name)
    caught = 1 - len(missed) / len(chosen)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations ({caught:.0%}) were caught")
    print("".join(f"not: {name}\n" for name in missed), end="")
    return int(caught < (FAST_SHARE if args.fast else 1))


if __name__ == "__main__":
    raise SystemExit(main())
