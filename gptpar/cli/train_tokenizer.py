"""``gptpar train-tokenizer``: train a SentencePiece tokenizer that loses nothing."""

from __future__ import annotations

import argparse

from gptpar.data.readers import FORMATS
from gptpar.data.tokenizer.train import MODEL_TYPES, train_file
from gptpar.system.command_line import Parser, positive_float, positive_int


def main(argv: list[str]) -> int:
    """Train, and print a summary."""
    args = _parser().parse_args(argv)
    summary = train_file(
        args.input,
        args.output or f"{args.model_prefix}.model",
        args.vocab_size,
        key=args.json_key,
        model_type=args.model_type,
        character_coverage=args.character_coverage,
        sample_bytes=int(args.sample_megabytes * 1e6),
        seed=args.seed,
    )
    print(summary)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gptpar train-tokenizer",
        description="Train a SentencePiece tokenizer that loses nothing: decode(encode(text)) is the text.",
        epilog="example:\n  gptpar train-tokenizer --input corpus.jsonl --vocab-size 8192 --output my.model",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=f"files, globs or folders: {FORMATS}")
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        required=True,
        metavar="N",
        help="number of ids, of which 259 are bytes and special pieces",
    )
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", metavar="FILE", help="the model file to write")
    output.add_argument("--model-prefix", metavar="PREFIX", help="write PREFIX.model, as SentencePiece's trainer does")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in JSON lines")
    parser.add_argument(
        "--model-type", choices=MODEL_TYPES, default="bpe", help="unigram takes about ten times as long"
    )
    parser.add_argument(
        "--character-coverage",
        type=positive_float,
        default=0.9995,
        metavar="FRACTION",
        help="fraction of the characters that get pieces of their own; the others are spelt in bytes",
    )
    parser.add_argument(
        "--sample-megabytes",
        type=positive_float,
        default=10.0,
        metavar="N",
        help="train on at most N million bytes, drawn at random from the inputs",
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of that draw")
    return parser
