"""Cases by hand: a line each with the worst deviations of an engine from plain torch.

python -m tests.any_module gpt2 --world 2 --stage 3 --ratio 0.6 --accumulation 3     one
python -m tests.any_module --list                                                    names of cases
python -m tests.any_module --full                                                    every case in every layout
python -m tests.any_module [NAME ...] --full                                         some cases in every layout
"""

import argparse
from collections.abc import Iterator, Sequence

from tests.any_module.case import STEPS, Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import KINDS, Deviations, problems
from tests.any_module.harness import GPTPAR
from tests.any_module.layouts import every_layout, fitting
from tests.any_module.matrix import Bench


def main(argv: Sequence[str] | None = None) -> int:
    """Returns how many cases deviate or fail."""
    args = _parser().parse_args(argv)
    names = list(dict.fromkeys(name for words in args.cases or [""] for name in _names(words)))
    if args.list:
        print("\n".join(names))
        return 0
    rows, wrong = [], 0
    print(_line("case", "layout", *KINDS))
    with Bench(args.engine, timeout_s=args.timeout) as bench:
        for name in names:
            found = [_deviations(bench, name, setup) for setup in _setups(CASES[name], args)]
            rows.append((name, [one for one in found if one is not None], len(found)))
            wrong += sum(one is None or bool(problems(one, CASES[name].tolerance)) for one in found)
    if args.full:
        _print_summary(rows)
    return wrong


def _names(words: str) -> list[str]:
    """The case of that name; else all in whose names it is."""
    return [words] if words in CASES else [name for name in CASES if words in name]


def _setups(case: Case, args: argparse.Namespace) -> Iterator[Setup]:
    one = Setup(args.world, args.stage, args.ratio, args.accumulation, args.clip, args.steps)
    return every_layout(case, one) if args.full else iter([fitting(case, one)])


def _deviations(bench: Bench, name: str, setup: Setup) -> Deviations | None:
    """Print a case's line; ``None``: it failed."""
    try:
        found = bench.deviations(name, setup)
    except Exception as error:
        print(f"{_line(name, setup)}FAILED\n{error}", flush=True)
        return None
    bad = problems(found, CASES[name].tolerance)
    print(
        _line(name, setup, *(f"{found[kind].size:.1e}" for kind in KINDS)) + f"   WRONG: {bad}" * bool(bad), flush=True
    )
    return found


def _print_summary(rows: Sequence[tuple[str, list[Deviations], int]]) -> None:
    """A line a case: how many layouts ran to their end, and the largest deviation of all."""
    print("\n" + _line("case", "layouts", "largest", "tolerance"))
    for name, found, count in rows:
        largest = max((one[kind].size for one in found for kind in KINDS), default=float("inf"))
        print(_line(name, f"{len(found)} of {count}", f"{largest:.1e}", f"{CASES[name].tolerance:.1e}"))


def _line(name: str, layout: object, *numbers: str) -> str:
    return f"{name:44}{layout!s:44}" + "".join(f"{number:>10}" for number in numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.any_module", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="names of cases, or parts of names; default: all")
    parser.add_argument("--list", action="store_true", help="say which they are")
    parser.add_argument("--full", action="store_true", help="1, 2 and 4 processes x ZeRO 0-3 x CPU share 0, 0.6, 1")
    parser.add_argument("--world", type=int, default=1, help="processes")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--ratio", type=float, default=0.0, help="share of the optimizer on the CPU")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step; --full: 1 and 2 in turns")
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm; 0: any")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--engine", default=GPTPAR, help="module:function")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    return parser


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
