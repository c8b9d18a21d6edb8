"""``gptpar runs DIR [--verify] [--json]``: the contents of a run folder, and the run that writes there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.cli.flags import parser_of
from gptpar.errors import CheckpointError, printable
from gptpar.exchange import why_not_to_show
from gptpar.reporting.banner import format_bytes
from gptpar.run.run_folder.survey import survey


def main(argv: list[str]) -> int:
    """Print the survey; returns 1 if a checkpoint of the folder or of a branch is damaged, else 0.

    Raises:
        CheckpointError: DIR is no folder, is itself a checkpoint, or holds another program's checkpoint.
    """
    args = parser_of("runs").parse_args(argv)
    if problem := why_not_to_show(args.dir):
        raise CheckpointError(problem)
    if (args.dir / MANIFEST_NAME).is_file():
        there = f"gptpar inspect {args.dir} shows it, and gptpar runs {args.dir.parent} the folder that it is in"
        raise CheckpointError(f"{args.dir} is itself a checkpoint: {there}")
    if not args.dir.is_dir():
        raise CheckpointError(f"{args.dir} is no folder: name a run folder (a --save folder)")
    found = survey(args.dir, verify=args.verify)
    print(json.dumps(found, indent=2) if args.json else "\n".join(map(printable, describe(found))))
    held = [found, *found["branches"]]
    return int(any(checkpoint["problems"] for folder in held for checkpoint in folder["checkpoints"]))


def describe(found: dict[str, Any]) -> Iterator[str]:
    """The survey as lines."""
    yield f"{found['folder']}: {_owner(found['owner'])}"
    yield from _table(found["checkpoints"])
    for branch in found["branches"]:
        yield f"branch {branch['name']}, left by going back to iteration {branch['from_iteration']}"
        if branch["owner"] is not None:
            yield f"  {_owner(branch['owner'])}"
        if not branch["complete"]:
            yield "  the move into it was cut short; the next run that saves into the folder completes it"
        yield from _table(branch["checkpoints"])
        if branch["go_on"] is not None:
            yield f"  to go on from there: {branch['go_on']}"
    for save in found["saves"]:
        state = "left by a save that died; the next save removes it" if save["dead"] else "a save in progress"
        yield f"{save['path']}: {state}"
    for path in found["moved_aside"]:
        yield f"{path}: damaged; renamed because that iteration was saved again"


def _table(checkpoints: list[dict[str, Any]]) -> Iterator[str]:
    if not checkpoints:
        yield "  no checkpoints"
        return
    yield f"  {'iteration':>9}  {'saved':<19}  {'size':>10}  state"
    for checkpoint in checkpoints:
        yield (
            f"  {checkpoint['iteration']:>9}  {checkpoint['saved']:<19}  {format_bytes(checkpoint['bytes']):>10}  "
            f"{_state(checkpoint)}"
        )
        yield from (f"{'':>13}{problem}" for problem in checkpoint["problems"])


def _state(checkpoint: dict[str, Any]) -> str:
    proof = checkpoint["verified"]
    if checkpoint["problems"]:
        return "DAMAGED" if proof is None else f"DAMAGED (every byte re-read {proof})"
    return "whole by manifest and sizes" if proof is None else f"whole (every byte re-read {proof})"


def _owner(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "no run writes here"
    if owner["host"] is None:
        return f"{owner['path']} cannot be read; last sign of life {owner['silent_seconds']} s ago"
    who = f"host {owner['host']}, process {owner['pid']}, since {owner['since']}"
    if owner["alive"]:
        return f"a run writes here ({who}; last sign of life {owner['silent_seconds']} s ago)"
    return f"left by a run that has ended ({who}); the next run takes it over"
