"""``gptpar train-tokenizer``: train a SentencePiece tokenizer that loses nothing."""

from __future__ import annotations

from gptpar.cli.flags import parser_of
from gptpar.data.readers import FORMATS
from gptpar.data.tokenizer.train import MODEL_TYPES, train_file


def main(argv: list[str]) -> int:
    """Train, and print a summary."""
    args = parser_of("train-tokenizer", formats=FORMATS, model_types=MODEL_TYPES).parse_args(argv)
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
