"""``gptpar inspect DIR [--verify] [--json]``: what a directory of checkpoints, or one checkpoint, holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptpar.checkpoint.describe import summary_of
from gptpar.checkpoint.folders import find_checkpoints
from gptpar.checkpoint.foreign import foreign_checkpoint
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.errors import CheckpointError, printable
from gptpar.reporting.banner import format_bytes
from gptpar.system.command_line import Parser


def main(argv: list[str]) -> int:
    """Print the summary; returns 1 if anything is damaged, else 0.

    Raises:
        CheckpointError: DIR holds no checkpoint.
    """
    parser = Parser(prog="gptpar inspect", description="Show what a checkpoint holds.")
    parser.add_argument("dir", type=Path, help="one checkpoint (iter_0000010), or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="re-read every byte and name what is damaged")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if foreign := foreign_checkpoint(args.dir):
        raise CheckpointError(f"{args.dir} holds {foreign}; gptpar inspects its own checkpoints only")
    found = [path for _, path in find_checkpoints(args.dir)]
    single = not found
    if single and not (args.dir / MANIFEST_NAME).exists() and not args.dir.name.startswith("iter_"):
        raise CheckpointError(f"{args.dir} is no checkpoint and holds none (no {MANIFEST_NAME}, no iter_*)")
    summaries = [summary_of(path, args.verify, details=single) for path in found or [args.dir]]
    if args.json:
        print(json.dumps(summaries[0] if single else summaries, indent=2))
    else:
        lines = _describe_one(summaries[0]) if single else _describe_all(summaries)
        print("\n".join(lines))
    return int(any(summary["problems"] for summary in summaries))


def _describe_all(summaries: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'iteration':>10} {'size':>12} {'tensors':>8}  elements"
    for summary in summaries:
        if "iteration" in summary:
            parts = ", ".join(f"{_name(name)} {group['elements']:,}" for name, group in summary["groups"].items())
            yield (
                f"{summary['iteration']:>10} {format_bytes(summary['bytes']):>12} {summary['tensors']:>8}  "
                f"{summary['elements']:,} ({parts}){_tag(summary['tag'])}"
            )
        yield from _describe_health(summary)


def _tag(tag: str | None) -> str:
    """What the user of an engine called it."""
    return "" if tag is None else f"  tag {_name(tag)}"


def _describe_one(summary: dict[str, Any]) -> Iterator[str]:
    if "iteration" in summary:
        yield f"{summary['path']}: iteration {summary['iteration']}"
        yield from _describe_meta(summary["meta"])
        names = [_name(row["name"]) for row in summary["table"]]
        width = max(map(len, names), default=4)
        yield f"{'name':<{width}}  {'dtype':<10} {'bytes':>16}  shape"
        for name, row in zip(names, summary["table"], strict=True):
            yield f"{name:<{width}}  {row['dtype']:<10} {row['bytes']:>16,}  {row['shape']}"
        for name, group in (summary["groups"] | {"total": summary}).items():
            size = format_bytes(group["bytes"])
            yield f"{_name(name)}: {group['tensors']} tensors, {group['elements']:,} elements, {size}"
    yield from _describe_health(summary)


def _describe_meta(meta: dict[str, Any]) -> Iterator[str]:
    """One line per group of settings; lists and deeper levels only by their length."""
    plain = {key: value for key, value in meta.items() if not isinstance(value, dict)}
    groups = {key: value for key, value in meta.items() if isinstance(value, dict)}
    for title, values in [("meta", plain), *groups.items()]:
        shown = (f"{_name(key)}={_brief(value)}" for key, value in values.items())
        if values:
            yield f"{_name(title)}: {', '.join(shown)}"


def _brief(value: Any) -> str:
    return f"<{len(value)} entries>" if isinstance(value, dict | list) else printable(str(value))


def _name(text: str) -> str:
    """A name as it is, or quoted: a sentence in its place could forge what is told."""
    return printable(text) if text and " " not in text else repr(text)


def _describe_health(summary: dict[str, Any]) -> Iterator[str]:
    for problem in summary["problems"]:
        yield f"DAMAGED {problem}"
    if summary["verified"] and not summary["problems"]:
        yield f"every byte of {summary['path']} is as it was saved"
