"""A sweep's results: as text, as a picture and as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptpar.cli.benchmark.combinations import Combination
from gptpar.cli.benchmark.runner import Completed
from gptpar.plan.planner import Plan
from gptpar.reporting.banner import in_gib
from gptpar.reporting.figures.sweep import Bar, draw_sweep

ALWAYS_SHOWN = ("layout", "micro-batch")
FIGURES = ("tokens/s", "ms", "MFU %", "GiB")
EXPECTED = ("plan ms", "plan GiB")


@dataclass(frozen=True)
class Measurement:
    """A combination that was run.

    Attributes:
        combination: which was run.
        outcome: of its command.
        plan: its prediction; ``None`` if the sweep made none.
    """

    combination: Combination
    outcome: Completed
    plan: Plan | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all processes; 0 if it failed."""
        return self.outcome.result["tokens_per_s"] if self.outcome.result else 0.0


def varying(combinations: Sequence[Combination]) -> list[str]:
    """The columns in which the combinations differ, and those that are always shown."""
    cells = [combination.cells for combination in combinations]
    return [name for name in cells[0] if name in ALWAYS_SHOWN or len({cell[name] for cell in cells}) > 1]


def ranked(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows with the best first and failed ones last."""
    return sorted(rows, key=lambda row: -row.tokens_per_s)


def table(rows: Sequence[Measurement], refused: Sequence[Combination]) -> str:
    """All rows, best first; then the failed combinations, then those that were not started, with the reasons."""
    everything = [*(row.combination for row in rows), *refused]
    if not everything:
        return "nothing was run."
    names = varying(everything)
    text = _measured(ranked(rows), names) if rows else []
    if refused:
        text += _not_started(refused, names)
    same = everything[0].describe([name for name in everything[0].cells if name not in names])
    return "\n".join([*([f"the same in all: {same}"] if same else []), *text])


def _not_started(refused: Sequence[Combination], names: list[str]) -> list[str]:
    """Each reason, and below it the combinations that were not started for it."""
    reasons: dict[str, list[str]] = {}
    for combination in refused:
        reasons.setdefault(combination.refusal, []).append(combination.describe(names))
    lines = [line for reason, which in reasons.items() for line in (f"  {reason}", *(f"    {one}" for one in which))]
    return [f"not started: {len(refused)}", *lines]


def _measured(rows: Sequence[Measurement], names: list[str]) -> list[str]:
    """A line of column names and one for each row; a failed row has its reason instead of figures."""
    planned = any(row.plan for row in rows)
    head = [*FIGURES, *(EXPECTED if planned else ())]
    places = _columns([names, *([row.combination.cells[name] for name in names] for row in rows)])
    figures = _columns([head, *(_figures(row, planned) for row in rows if row.outcome.result)])
    reasons = [row.outcome.failure for row in rows if not row.outcome.result]
    return [f"{place}  {rest}" for place, rest in zip(places, [*figures, *reasons], strict=True)]


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells below each other, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _figures(row: Measurement, planned: bool) -> list[str]:
    result = row.outcome.result or {}
    mfu, memory = result["mfu"], result["peak_mem_gib"]
    figures = [
        f"{result['tokens_per_s']:,.1f}",
        f"{result['ms_per_step']:,.1f}",
        "-" if mfu is None else f"{100 * mfu:.1f}",
        "-" if memory is None else f"{memory:.2f}",
    ]
    if planned:
        plan = row.plan
        figures += ["-", "-"] if plan is None else [f"{1e3 * plan.time.total:,.1f}", f"{_expected_gib(plan):.2f}"]
    return figures


def _expected_gib(plan: Plan) -> float:
    """The predicted peak of the first rank's allocator, which a benchmark measures, in GiB."""
    return in_gib(plan.memory[0].allocated)


def json_line(row: Measurement, words: Sequence[str], about: Mapping[str, str]) -> dict[str, Any]:
    """One line in the format of ``benchmarks/*.jsonl``.

    Args:
        row: one that was measured.
        words: the words that all command lines share.
        about: facts of the machine.
    """
    assert row.outcome.result is not None
    flags = " ".join([*words, *row.combination.flags])
    line = {"program": "gptpar benchmark", **row.outcome.result, "flags": flags, **about}
    if row.plan is not None:
        line["plan_ms_per_step"] = round(1e3 * row.plan.time.total, 3)
        line["plan_gib"] = round(_expected_gib(row.plan), 2)
    return line


def draw(rows: Sequence[Measurement], path: Path, about: Mapping[str, str]) -> None:
    """Write a PNG: a bar for each measured combination, best first, with a mark for plan's prediction."""
    names = varying([row.combination for row in rows])
    shown = [row for row in ranked(rows) if row.outcome.result]
    draw_sweep([_bar(row, names) for row in shown], path, about["machine"])


def _bar(row: Measurement, names: list[str]) -> Bar:
    expected = None if row.plan is None else row.plan.tokens_per_second
    return Bar(row.combination.describe(names), row.tokens_per_s, _note(row), expected)


def _note(row: Measurement) -> str:
    result = row.outcome.result or {}
    memory = result.get("peak_mem_gib")
    return f"{result['ms_per_step']:,.1f} ms" + ("" if memory is None else f", {memory:.1f} GiB")
