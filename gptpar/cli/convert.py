"""``gptpar convert SOURCE TARGET``: a checkpoint becomes a Hugging Face folder, a foreign model a checkpoint."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from gptpar.checkpoint import find_checkpoints, load_meta, newest_whole
from gptpar.checkpoint.folders import files_of
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.cli.given_tokenizer import add_tokenizer_flags, given_files
from gptpar.errors import CheckpointError
from gptpar.exchange import DTYPES, ExportOptions, holds_ours, import_model, prepare_export
from gptpar.reporting.banner import format_bytes
from gptpar.system.command_line import Parser, not_negative_int
from gptpar.system.data_flags import TOKENIZER_FILES, TOKENIZER_TYPES
from gptpar.system.quantities import positive_bytes


def make_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    parser = Parser(
        prog="gptpar convert",
        description="Convert a checkpoint of gptpar to a Hugging Face folder, or another program's model to a "
        "checkpoint.\nThe files of SOURCE tell its kind. SOURCE stays as it is; TARGET appears whole or not at all.\n"
        "A Hugging Face folder comes back byte for byte if nothing was trained and its safetensors files hold each\n"
        "weight once and nothing else. Otherwise the weights come back in files as transformers writes them.",
        epilog="examples:\n  gptpar convert runs/350M hf/350M --dtype bf16\n  gptpar convert hf/Llama-3 runs/Llama-3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a run folder or checkpoint, or a foreign model")
    parser.add_argument("target", type=Path, metavar="TARGET", help="a new folder")
    to_hf = parser.add_argument_group("to Hugging Face")
    to_hf.add_argument("--ckpt-step", type=not_negative_int, metavar="N", help="this iteration instead of the newest")
    to_hf.add_argument(
        "--dtype", choices=tuple(DTYPES), help="number format of the weights (default: as imported, else the run's)"
    )
    to_hf.add_argument(
        "--max-shard-size",
        type=positive_bytes,
        metavar="SIZE",
        help="largest weight file (default: as imported, else 5GB)",
    )
    to_hf.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer files")
    to_hf.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help="this type instead of the checkpoint's"
    )
    add_tokenizer_flags(to_hf)
    return parser


def main(argv: list[str]) -> int:
    """Convert, and say what was written."""
    args = make_parser().parse_args(argv)
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
    if given:
        raise CheckpointError(f"{', '.join(given)}: for checkpoints of gptpar only, and {args.source} holds none")
    return import_model(args.source, args.target)
