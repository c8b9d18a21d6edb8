"""Inject seeded faults into real runs, each in a fresh folder, and judge each by its oracle.

    python -m tests.faults --short                    one of each kind: a minute on two cores (part of CI)
    python -m tests.faults --count 500 --seed 1000    all kinds; prints the table of docs/reliability.md
    python -m tests.faults --set held-out --count 150 kinds that an outsider wrote down; a table of their own
    python -m tests.faults --one KIND:WORKERS:SEED    one fault alone, with the output of its commands
    python -m tests.faults --list                     the kinds, and what each does

A fault that was not survived is printed with the command that repeats it, and the exit status is 1. A run of the suite
that was cut short goes on where it was if it gets the same --work folder. Seeds determine everything random except the
scheduler's choices. --record adds a line with the table to benchmarks/faults.jsonl; tools/measured_tables.py shows it
in docs/reliability.md.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # before numpy and torch: a process with threads cannot be forked
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tests.faults import commands  # noqa: E402
from tests.faults.fault import OK, Failed, Fault, Measured, Verdict, chosen  # noqa: E402
from tests.faults.place import Place  # noqa: E402
from tests.faults.prepared import Prepared  # noqa: E402
from tests.faults.table import SETS, as_text, kind_of, summary  # noqa: E402

RECORD = commands.ROOT / "benchmarks/faults.jsonl"
SHORT_SEED = 1


def judge(fault: Fault, prepared: Prepared, folder: Path, *, talk: bool = False) -> Verdict:
    """Inject one fault, and judge its outcome."""
    kind, began = kind_of(fault.kind, fault.workers), time.monotonic()
    place = Place(folder, prepared, fault.workers, fault.seed)
    outcome, seen, measured = OK, "", Measured()
    try:
        measured = kind.inject(place)
    except Failed as failed:
        outcome, seen = failed.outcome, failed.seen
    except Exception:
        outcome, seen = "not whole", f"the suite itself failed: {traceback.format_exc()[-600:]}"
    if talk:
        print(place.logs())
    place.close()
    seen = "; ".join([*place.notes, seen]) if seen else ""
    seconds = round(time.monotonic() - began, 2)
    return Verdict(str(fault), outcome, seen, measured.steps_lost, measured.seconds_to_exit, seconds)


def judge_all(faults: Sequence[Fault], prepared: Prepared, work: Path, jobs: int) -> Iterator[Verdict]:
    """Judge faults in ``jobs`` forked processes; what the folder has verdicts of already is not judged again."""
    results = work / "verdicts.jsonl"
    known = [Verdict(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    done = {verdict.fault: verdict for verdict in known}
    yield from (done[str(fault)] for fault in faults if str(fault) in done)
    left = {fault: work / "places" / str(fault).replace(":", "-") for fault in faults if str(fault) not in done}
    with ProcessPoolExecutor(jobs, commands.FORK) as pool, results.open("a") as file:
        judged = [pool.submit(judge, fault, prepared, place) for fault, place in left.items()]
        for one in as_completed(judged):
            verdict = one.result()
            file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
            file.flush()
            yield verdict


def _tell(verdict: Verdict) -> None:
    if verdict.outcome != OK:
        print(f"{verdict.fault}: {verdict.outcome}: {verdict.seen}")
        print(f"    again: python -m tests.faults --one {verdict.fault}", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="one fault of each kind of one worker")
    parser.add_argument("--count", type=int, default=500, help="number of faults, about (default: 500)")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed of each kind (default: 1000)")
    parser.add_argument("--set", choices=SETS, default="built", help="set of kinds (default: built)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="kinds to choose from")
    parser.add_argument("--workers", type=int, choices=(1, 2, 4), help="only kinds with this number of workers")
    parser.add_argument("--one", type=Fault.parse, metavar="KIND:WORKERS:SEED", help="one fault, with all output")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--work", type=Path, help="folder to work in, and to go on in later (default: a temporary one)")
    parser.add_argument("--record", action="store_true", help=f"add the result to {RECORD.name}")
    parser.add_argument("--list", action="store_true", help="name the kinds")
    return parser.parse_args(argv)


def faults_of(args: argparse.Namespace) -> list[Fault]:
    """The faults that the command line asks for, long ones first."""
    if args.one:
        return [args.one]
    kinds = [kind for kind in SETS[args.set] if not args.only or kind.name in args.only]
    kinds = [kind for kind in kinds if args.workers in (None, kind.workers)]
    if args.short:
        kinds = [kind for kind in kinds if kind.workers == 1]
    found = chosen(kinds, 1 if args.short else args.count, SHORT_SEED if args.short else args.seed)
    return sorted(found, key=lambda fault: -fault.workers)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, print the table; returns the exit status."""
    args = _arguments(argv)
    if args.list:
        for kind in SETS[args.set]:
            print(f"{kind.name:34} {kind.workers}  {(kind.inject.__doc__ or '').strip().splitlines()[0]}")
        return 0
    faults = faults_of(args)
    commands.preload()
    with tempfile.TemporaryDirectory(prefix="gptpar-faults-") as temporary:
        work, began = (args.work or Path(temporary)).resolve(), time.monotonic()
        work.mkdir(parents=True, exist_ok=True)
        prepared = Prepared(work / "prepared")
        prepared.prepare({1, *(fault.workers for fault in faults)})
        if args.one:
            verdict = judge(args.one, prepared, work / "one", talk=True)
            print(verdict)
            return int(verdict.outcome != OK)
        verdicts = []
        for verdict in judge_all(faults, prepared, work, args.jobs):
            verdicts.append(verdict)
            _tell(verdict)
        bad = sum(verdict.outcome != OK for verdict in verdicts) + len(faults) - len(verdicts)
        print(as_text(verdicts))
        print(f"{len(verdicts)} faults, {bad} not survived, {time.monotonic() - began:.0f} s")
        if args.record:
            line = {"set": args.set, "seed": args.seed, "faults": len(verdicts), "not_survived": bad}
            with RECORD.open("a") as file:
                file.write(json.dumps({**line, "kinds": summary(verdicts)}) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
