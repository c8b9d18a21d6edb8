"""``gptpar preprocess``: turn text into .bin/.idx data sets."""

from __future__ import annotations

import argparse
import dataclasses

from gptpar.data.preprocess import Encoder, TokenizerSpec, preprocess
from gptpar.data.readers import FORMATS
from gptpar.data.tokenizer import add_tokenizer_flags
from gptpar.system.command_line import Parser, positive_int
from gptpar.system.host import cores


def main(argv: list[str]) -> int:
    """Tokenize, and print a summary."""
    args = _parser().parse_args(argv)
    spec = TokenizerSpec(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TokenizerSpec)})
    encoder = Encoder(spec, tuple(args.json_keys), args.append_eod, args.skip_bad_lines, args.prepend_bos)
    workers = args.workers or len(cores())
    print(preprocess(args.input, args.output_prefix, encoder, workers=workers, log_interval=args.log_interval))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gptpar preprocess",
        description="Tokenize documents into PREFIX_KEY_document.bin and .idx, byte for byte Megatron-LM's.",
        epilog="example:\n  gptpar preprocess --input corpus.jsonl --output-prefix data/corpus \\\n"
        "      --append-eod --tokenizer-type GPT2BPETokenizer \\\n"
        "      --vocab-file encoder.json --merge-file vocab.bpe",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, globs or folders: {FORMATS}. JSON holds one object a line; a text file is one document",
    )
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="where the output files' names begin")
    data.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys to tokenize, each into files of its own",
    )
    data.add_argument(
        "--append-eod", action="store_true", help="end each document that is not empty with the eod token"
    )
    data.add_argument(
        "--prepend-bos",
        action="store_true",
        help="begin each document that is not empty with the tokenizer's bos token, as Llama's do",
    )
    data.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="count and skip lines that cannot be read, instead of stopping at the first",
    )
    accepted = "accepted for Megatron's scripts"
    data.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help=accepted)
    data.add_argument("--keep-sequential-samples", action="store_true", help=f"{accepted}: this is always so")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=positive_int, metavar="N", help="threads or processes (default: one a core)")
    runtime.add_argument("--chunk-size", type=positive_int, metavar="N", help=accepted)
    runtime.add_argument(
        "--log-interval",
        type=positive_int,
        metavar="DOCUMENTS",
        help="report progress after this many documents (default: every 5 seconds; a terminal always shows it live)",
    )
    add_tokenizer_flags(parser)
    return parser
