"""``gptpar doctor``: whether this machine is ready to train, and how fast it moves bytes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from gptpar.cli.doctor.finding import Finding
from gptpar.cli.doctor.machine import MIB, machine_findings, speed_findings
from gptpar.cli.doctor.software import software_findings
from gptpar.cli.flags import parser_of
from gptpar.errors import printable

WIDTH = 100


def main(argv: list[str]) -> int:
    """Print what was found; returns 1 if any line warns, else 0."""
    options = parser_of("doctor").parse_args(argv)
    findings = [*software_findings(), *machine_findings(options.folder)]
    findings += speed_findings(options.folder, options.mib * MIB)
    if options.json:
        print(json.dumps(as_json(findings)))
    else:
        print("\n".join(lines(findings)))
    return int(not all(finding.is_ok for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings by name, and whether all of them are ok."""
    found = {
        one.name: {"ok": one.is_ok, "text": one.text, "advice": one.advice, "value": one.value} for one in findings
    }
    return {"ok": all(one.is_ok for one in findings), "findings": found}


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding, its advice below it, and the number of warnings at the end."""
    width = max(len(one.name) for one in findings)
    for one in findings:
        state = "ok  " if one.is_ok else "warn"
        yield printable(f"{state}  {one.name:<{width}}  {one.text}"[:WIDTH])
        indent = " " * (width + 8)
        yield from textwrap.wrap(printable(one.advice), WIDTH, initial_indent=indent, subsequent_indent=indent)
    warnings = sum(not one.is_ok for one in findings)
    yield f"{warnings} of {len(findings)} lines warn" if warnings else f"all {len(findings)} lines are ok"
