"""``gptpar benchmark --sweep``: many configurations, each in processes of its own."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

from gptpar.cli.benchmark.combinations import Combination, combinations, contradictions
from gptpar.cli.benchmark.machine import about_machine
from gptpar.cli.benchmark.predict import most_promising, predict, unknown_to_plan
from gptpar.cli.benchmark.runner import Completed, append_line, terminated_like_ctrl_c
from gptpar.cli.benchmark.table import Measurement, draw, json_line, table, varying
from gptpar.cli.flags import add_flags
from gptpar.cli.launch import is_worker, refuse_several, workers_wanted
from gptpar.config.flags import ParsedFlags
from gptpar.config.validate import range_problems
from gptpar.errors import ConfigError
from gptpar.plan.hardware import GPUS
from gptpar.plan.planner import Plan
from gptpar.plan.space.dimensions import cpu_ratio, layout_sizes

Runner = Callable[[Sequence[str], float], Completed]
"""Runs a command for at most a number of seconds."""
SAID_PER_COMBINATION = "--sequence-parallel"
"""A switch that only some layouts can have; it is left out of the words that all runs share."""
INTERRUPTED = 130
TIMEOUT_S = 600.0


def sweep_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a sweep."""
    types = {"layout_sizes": layout_sizes, "cpu_ratio": cpu_ratio}
    add_flags(parser, "benchmark --sweep", **types, gpus=tuple(GPUS), timeout=f"{TIMEOUT_S:g}")


def shared_words(argv: Sequence[str]) -> list[str]:
    """The words that the command lines of all runs share, before those that a combination adds."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    sweep_flags(parser)
    return [word for word in parser.parse_known_args(argv)[1] if word != SAID_PER_COMBINATION]


def sweep(parsed: ParsedFlags, words: Sequence[str], run: Runner) -> int:
    """Run the combinations that validation accepts, and print the table.

    Args:
        words: the words that the command lines of all runs share.
        run: runs a command.

    Returns:
        The exit status: 0 if anything was measured, 1 if nothing was, 130 after Ctrl-C.

    Raises:
        ConfigError: mistakes that concern all combinations.
    """
    refuse_several()
    count = workers_wanted(parsed.flags.parallel.nproc_per_node)
    problems = [*parsed.problems, *range_problems(parsed.flags), *contradictions(parsed)]
    if is_worker():
        problems.append("--sweep starts the processes itself: run it without torchrun.")
    if problems:
        raise ConfigError(problems)
    everything = combinations(parsed, count)
    if not everything:
        raise ConfigError([f"no layout of {count} process(es) has the sizes that the command line gives."])
    queue, left_out = _queue(parsed, everything, count)
    about = about_machine(count)
    batch = everything[0].typed.batch.global_batch_size
    print(f"{len(queue)} of {len(everything)} combinations on {about['machine']}, {batch} samples a step", flush=True)
    measuring = _measure(queue, words, run, parsed.rest.sweep_timeout or TIMEOUT_S, varying(everything))
    rows: list[Measurement] = []
    interrupted, lines = False, parsed.rest.json_lines
    try:
        with terminated_like_ctrl_c():
            for row in measuring:
                rows.append(row)
                if lines is not None and row.outcome.result is not None:
                    append_line(lines, json_line(row, words, about))
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(rows)} of {len(queue)}", flush=True)
    print(table(rows, left_out), flush=True)
    measured = any(row.outcome.result for row in rows)
    png = parsed.rest.png
    if png is not None and measured:
        draw(rows, png, about)
        print(f"wrote {png}")
    return INTERRUPTED if interrupted else int(not measured)


def _queue(
    parsed: ParsedFlags, everything: Sequence[Combination], count: int
) -> tuple[Sequence[tuple[Combination, Plan | None]], list[Combination]]:
    """(combinations to run, with their plans if plans have chosen them; combinations that are refused or left out)"""
    refused = [one for one in everything if one.refusal]
    accepted = [one for one in everything if not one.refusal]
    if parsed.rest.sweep_top is None:
        return [(one, None) for one in accepted], refused
    queue, left = most_promising(accepted, predict(parsed, accepted, count), parsed.rest.sweep_top)
    if unknown := sorted({flag for one in accepted for flag in unknown_to_plan(one.typed)}):
        print(f"plan does not know {', '.join(unknown)}: its predictions are without")
    return queue, refused + left


def _measure(
    queue: Sequence[tuple[Combination, Plan | None]],
    words: Sequence[str],
    run: Runner,
    timeout: float,
    names: list[str],
) -> Iterator[Measurement]:
    """Run the combinations one after the other, and print the progress."""
    seconds: list[float] = []
    for number, (combination, plan) in enumerate(queue):
        each = statistics.mean(seconds) if seconds else timeout
        left = f"{'about' if seconds else 'at most'} {_duration((len(queue) - number) * each)} left"
        print(f"[{number + 1} of {len(queue)}, {left}] {combination.describe(names)}", end=" ... ", flush=True)
        outcome = run([sys.executable, "-m", "gptpar", "benchmark", *words, *combination.flags], timeout)
        seconds.append(outcome.seconds)
        result = outcome.result
        said = f"{result['tokens_per_s']:,.1f} tokens/s" if result else outcome.failure
        print(said, flush=True)
        yield Measurement(combination, outcome, plan)


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds > 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
