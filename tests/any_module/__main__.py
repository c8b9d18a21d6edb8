"""Cases by hand: a line each with the worst deviations of an engine from plain torch.

python -m tests.any_module gpt2 --world 2 --stage 3 --ratio 0.6 --accumulation 3     one
python -m tests.any_module --list                                                    names of cases
python -m tests.any_module [WORDS] --full                                            every layout
python -m tests.any_module mlp --engine tests.any_module.plain_engine:initialize     the harness's own engine
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from tests.any_module.case import STEPS, Setup
from tests.any_module.compare import KINDS, problems
from tests.any_module.harness import CASES, GPTPAR
from tests.any_module.matrix import Bench

WORLDS, STAGES, RATIOS = (1, 2, 4), (0, 1, 2, 3), (0.0, 0.6, 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns how many cases deviate or fail."""
    args = _parser().parse_args(argv)
    names = [name for name in CASES if args.cases == name] or [name for name in CASES if args.cases in name]
    if args.list:
        print("\n".join(names))
        return 0
    wrong = 0
    print(f"{'case':44}{'layout':44}" + "".join(f"{kind:>10}" for kind in KINDS))
    with Bench(args.engine, timeout_s=args.timeout) as bench:
        for name, setup in itertools.product(names, _setups(args)):
            try:
                found = bench.deviations(name, setup)
            except Exception as error:
                print(f"{name:44}{setup!s:44}FAILED\n{error}", flush=True)
                wrong += 1
                continue
            bad = problems(found, CASES[name].tolerance)
            sizes = "".join(f"{found[kind].size:10.1e}" for kind in KINDS)
            print(f"{name:44}{setup!s:44}{sizes}{'   WRONG: ' + bad if bad else ''}", flush=True)
            wrong += bool(bad)
    return wrong


def _setups(args: argparse.Namespace) -> Iterator[Setup]:
    if not args.full:
        yield Setup(args.world, args.stage, args.ratio, args.accumulation, args.clip, args.steps)
        return
    for world, stage, ratio in itertools.product(WORLDS, STAGES, RATIOS):
        yield Setup(world, stage, ratio, args.accumulation, args.clip, args.steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.any_module", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="?", default="", help="a case, or part of the names of several; default: all")
    parser.add_argument("--list", action="store_true", help="say which they are")
    parser.add_argument("--full", action="store_true", help="1, 2 and 4 processes x ZeRO 0-3 x CPU share 0, 0.6, 1")
    parser.add_argument("--world", type=int, default=1, help="processes")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--ratio", type=float, default=0.0, help="share of the optimizer on the CPU")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm; 0: any")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--engine", default=GPTPAR, help="module:function, or mistake:NAME")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    return parser


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
