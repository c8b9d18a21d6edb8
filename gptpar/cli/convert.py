"""``gptpar convert SOURCE TARGET``: a checkpoint becomes a Hugging Face folder, a foreign model a checkpoint."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from gptpar.checkpoint import find_checkpoints, load_meta, newest_whole
from gptpar.checkpoint.folders import files_of
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.cli.flags import parser_of
from gptpar.cli.given_tokenizer import add_tokenizer_flags, given_files
from gptpar.errors import CheckpointError
from gptpar.exchange import DTYPES, ExportOptions, holds_ours, import_model, prepare_export
from gptpar.reporting.banner import format_bytes
from gptpar.system.data_flags import TOKENIZER_FILES, TOKENIZER_TYPES
from gptpar.system.quantities import positive_bytes


def main(argv: list[str]) -> int:
    """Convert, and say what was written."""
    facts = {"dtypes": tuple(DTYPES), "types": TOKENIZER_TYPES, "positive_bytes": positive_bytes}
    parser = parser_of("convert", **facts)
    add_tokenizer_flags(parser.add_argument_group("tokenizer files to Hugging Face"))
    args = parser.parse_args(argv)
    started = time.monotonic()
    if holds_ours(args.source):
        path = _checkpoint(args.source, args.ckpt_step)
        export = prepare_export(path, args.target, _options(args))
        export.write(args.target)
        what, num_bytes, then = f"Hugging Face folder {args.target} from {path}", export.nbytes, ""
    else:
        path = _convert_foreign(args)
        what, num_bytes = f"checkpoint {path} from {args.source}", sum(one.stat().st_size for one in files_of(path))
        then = _how_to_go_on(path)
    seconds = time.monotonic() - started
    print(f"made the {what}: {format_bytes(num_bytes)} in {seconds:.1f} s{then}")
    return 0


def _how_to_go_on(path: Path) -> str:
    meta, load = load_meta(path), f"--load {path.parent}"
    if (steps := meta.get("optimizer_steps")) is None:
        return f"\nit holds weights alone: a run begins with them by {load} --finetune"
    return f"\nit holds the optimizer's state after {steps:,} updates: a run goes on with it by {load}"


def _options(args: argparse.Namespace) -> ExportOptions:
    kind = {} if args.tokenizer_type is None else {"tokenizer_type": args.tokenizer_type}
    return ExportOptions(
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        max_shard_bytes=args.max_shard_size,
        given_tokenizer=kind | given_files(args),
        with_tokenizer=not args.no_tokenizer,
    )


def _checkpoint(source: Path, iteration: int | None) -> Path:
    """The checkpoint that the source names: itself, or the newest or the given one of a folder.

    Raises:
        CheckpointError: there is none, or none that is whole.
    """
    if (source / MANIFEST_NAME).is_file():
        return source
    found = dict(find_checkpoints(source))
    if iteration is not None:
        if iteration not in found:
            have = ", ".join(map(str, sorted(found)))
            raise CheckpointError(f"{source} has no checkpoint of iteration {iteration}; it has {have}")
        return found[iteration]
    if (newest := newest_whole([source])) is None:
        raise CheckpointError(f"{source} holds no whole checkpoint; gptpar inspect {source} says what is damaged")
    return newest[1]


def _convert_foreign(args: argparse.Namespace) -> Path:
    """Make a checkpoint of a model that another program saved.

    Raises:
        CheckpointError: the source cannot be read, or there are flags that only an export reads.
    """
    only_out = ("ckpt_step", "dtype", "max_shard_size", "tokenizer_type", *TOKENIZER_FILES)
    given = [f"--{name.replace('_', '-')}" for name in only_out if getattr(args, name) is not None]
    given += ["--no-tokenizer"] * args.no_tokenizer
    if given:
        raise CheckpointError(f"{', '.join(given)}: for checkpoints of gptpar only, and {args.source} holds none")
    return import_model(args.source, args.target)
