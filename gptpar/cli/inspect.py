"""``gptpar inspect DIR [--verify] [--json]``: the contents of checkpoints, and of bundles of skipped outliers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptpar.checkpoint.folders import find_checkpoints
from gptpar.checkpoint.manifest import MANIFEST_NAME, DamagedCheckpoint, Manifest, dtype_name, read_manifest
from gptpar.checkpoint.verify import verify_checkpoint
from gptpar.cli.flags import parser_of
from gptpar.errors import CheckpointError, printable
from gptpar.exchange import why_not_to_show
from gptpar.reporting.banner import WIDTH, format_bytes
from gptpar.run.health.spikes import FILE as SPIKE_FILE
from gptpar.run.health.spikes import bundles_in, describe_bundle, read_bundle


def main(argv: list[str]) -> int:
    """Print the summary; returns 1 if anything is damaged, else 0.

    Raises:
        CheckpointError: DIR has no checkpoint.
        GptparError: DIR is a bundle that cannot be read.
    """
    args = parser_of("inspect").parse_args(argv)
    if bundles := [args.dir] if (args.dir / SPIKE_FILE).exists() else bundles_in(args.dir):
        return _show_spikes(bundles, as_json=args.json)
    if problem := why_not_to_show(args.dir):
        raise CheckpointError(problem)
    found = [path for _, path in find_checkpoints(args.dir)]
    single = not found
    if single and not (args.dir / MANIFEST_NAME).exists() and not args.dir.name.startswith("iter_"):
        raise CheckpointError(f"{args.dir} is no checkpoint and holds none (no {MANIFEST_NAME}, no iter_*)")
    summaries = [summary_of(path, args.verify, details=single) for path in found or [args.dir]]
    if args.json:
        print(json.dumps(summaries[0] if single else summaries, indent=2))
    else:
        lines = _describe_one(summaries[0]) if single else _describe_all(summaries)
        print("\n".join(map(printable, lines)))  # the path may hold control characters
    return int(any(summary["problems"] for summary in summaries))


def _show_spikes(bundles: list[Path], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([read_bundle(path) for path in bundles], indent=2))
    else:
        print("\n".join(line for path in bundles for line in describe_bundle(path)))
    return 0


def _describe_all(summaries: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'iteration':>10} {'size':>12} {'tensors':>8}  elements"
    for summary in summaries:
        if "iteration" in summary:
            parts = ", ".join(f"{_name(name)} {group['elements']:,}" for name, group in summary["groups"].items())
            tag = "" if summary["tag"] is None else f"  tag {_name(summary['tag'])}"  # the user's of an engine
            yield (
                f"{summary['iteration']:>10} {format_bytes(summary['bytes']):>12} {summary['tensors']:>8}  "
                f"{summary['elements']:,} ({parts}){tag}"
            )
        yield from _describe_health(summary)


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
    """Each group of settings, in lines that fit a terminal; of lists and deeper levels, only the length is shown."""
    plain = {key: value for key, value in meta.items() if not isinstance(value, dict)}
    groups = {key: value for key, value in meta.items() if isinstance(value, dict)}
    for title, values in [("meta", plain), *groups.items()]:
        if values:
            yield from _wrapped(f"{_name(title)}:", [f"{_name(key)}={_brief(value)}" for key, value in values.items()])


def _wrapped(title: str, settings: Sequence[str]) -> Iterator[str]:
    """The settings after their title; lines break between settings, never inside one."""
    line = title
    for setting in (*(f"{setting}," for setting in settings[:-1]), settings[-1]):
        if len(line) + 1 + len(setting) > WIDTH:
            yield line
            line = " " * 3
        line += f" {setting}"
    yield line


def _brief(value: Any) -> str:
    return f"<{len(value)} entries>" if isinstance(value, dict | list) else printable(str(value))


def _name(text: str) -> str:
    """A plain name as it is, any other quoted, because a sentence as a name could forge the output."""
    return printable(text) if text and " " not in text else repr(text)


def _describe_health(summary: dict[str, Any]) -> Iterator[str]:
    for problem in summary["problems"]:
        yield f"DAMAGED {problem}"
    if summary["verified"] and not summary["problems"]:
        yield f"every byte of {summary['path']} is as it was saved"


def summary_of(path: Path, verify: bool, *, details: bool) -> dict[str, Any]:
    """One checkpoint, fit for JSON; what is damaged stands under ``problems``.

    Args:
        verify: whether every byte is read again.
        details: adds meta and every tensor.
    """
    summary: dict[str, Any] = {"path": str(path), "verified": verify, "problems": []}
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        summary["problems"] = [str(error)]
        return summary
    summary |= {
        "iteration": manifest.iteration,
        "tag": tag if isinstance(tag := manifest.meta.get("tag"), str) else None,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "elements": sum(entry.numel for entry in manifest.tensors.values()),
        "groups": _groups(manifest),
    }
    if verify:
        summary["problems"] = verify_checkpoint(path)
    if details:
        summary["meta"] = manifest.meta
        summary["table"] = [
            {
                "name": name,
                "dtype": dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "chunks": len(entry.chunks),
            }
            for name, entry in manifest.tensors.items()
        ]
    return summary


def _groups(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes by the first part of the name: weights, each of the optimizer's states, buffers."""
    groups: dict[str, dict[str, int]] = {}
    for name, entry in manifest.tensors.items():
        group = groups.setdefault(re.split("[./]", name)[0], {"tensors": 0, "elements": 0, "bytes": 0})
        group["tensors"] += 1
        group["elements"] += entry.numel
        group["bytes"] += entry.nbytes
    return groups
