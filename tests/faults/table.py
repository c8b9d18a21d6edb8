"""All kinds of faults, and the table of their outcomes."""

from collections import Counter
from collections.abc import Iterable

from tests.faults import damage, disks, mixed_up, stopped, strangers
from tests.faults.fault import OK, OUTCOMES, Kind, Verdict
from tests.faults.held_out import folders, inputs, processes, surroundings, texts

BUILT = (stopped, disks, damage, mixed_up, strangers)
HELD_OUT = (folders, surroundings, processes, inputs, texts)
SETS: dict[str, list[Kind]] = {
    name: sorted((kind for module in modules for kind in module.KINDS), key=lambda kind: kind.workers)
    for name, modules in (("built", BUILT), ("held-out", HELD_OUT))
}
"""Kinds that were written with the code they disturb, and kinds that an outsider wrote down afterwards."""

KINDS = [kind for kinds in SETS.values() for kind in kinds]


def kind_of(name: str, workers: int) -> Kind:
    """A kind by its name and workers.

    Raises:
        LookupError: there is none.
    """
    for kind in KINDS:
        if (kind.name, kind.workers) == (name, workers):
            return kind
    raise LookupError(f"there is no kind of faults {name} with {workers} workers; --list names all")


def summary(verdicts: Iterable[Verdict]) -> list[dict[str, object]]:
    """A row for each kind: number of faults, of each outcome, most steps lost, longest time to exit."""
    rows: dict[tuple[str, int], list[Verdict]] = {}
    for verdict in verdicts:
        kind, workers, _ = verdict.fault.split(":")
        rows.setdefault((kind, int(workers)), []).append(verdict)
    return [
        {
            "kind": kind,
            "workers": workers,
            "faults": len(found),
            "outcomes": dict(Counter(one.outcome for one in found)),
            "max_steps_lost": max(one.steps_lost for one in found),
            "max_seconds_to_exit": round(max(one.seconds_to_exit for one in found), 1),
        }
        for (kind, workers), found in sorted(rows.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def as_text(verdicts: Iterable[Verdict]) -> str:
    """The table for a terminal."""
    rows = summary(verdicts)
    lines = [f"{'kind':34} {'workers':>7} {'faults':>6} {'ok':>5} {'steps lost':>10} {'to exit':>8}  other outcomes"]
    for row in rows:
        outcomes = row["outcomes"]
        assert isinstance(outcomes, dict)
        others = ", ".join(f"{name} {outcomes[name]}" for name in OUTCOMES[1:] if name in outcomes)
        lines.append(
            f"{row['kind']:34} {row['workers']:>7} {row['faults']:>6} {outcomes.get(OK, 0):>5} "
            f"{row['max_steps_lost']:>10} {row['max_seconds_to_exit']:>6} s  {others}".rstrip()
        )
    return "\n".join(lines)
