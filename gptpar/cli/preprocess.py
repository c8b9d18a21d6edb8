"""``gptpar preprocess``: turn text into .bin/.idx data sets."""

from __future__ import annotations

import argparse
import dataclasses

from gptpar.cli.flags import parser_of
from gptpar.data.packing import PackSpec, pack
from gptpar.data.preprocess import Encoder, TokenizerSpec, preprocess
from gptpar.data.readers import FORMATS
from gptpar.data.tokenizer import build_tokenizer
from gptpar.data.tokenizer.tik import PATTERNS
from gptpar.errors import DataError
from gptpar.system.data_flags import TIKTOKEN, TOKENIZER_FILES, TOKENIZER_TYPES
from gptpar.system.host import cores


def main(argv: list[str]) -> int:
    """Tokenize, and print a summary."""
    types = {"types": TOKENIZER_TYPES, "types_text": ", ".join(TOKENIZER_TYPES)}
    facts = {**types, **TOKENIZER_FILES, **TIKTOKEN, "formats": FORMATS, "patterns": tuple(PATTERNS)}
    args = parser_of("preprocess", **facts).parse_args(argv)
    spec = TokenizerSpec(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TokenizerSpec)})
    encoder = Encoder(spec, tuple(args.json_keys), args.append_eod, args.skip_bad_lines, args.prepend_bos)
    packing = _packing(args)
    workers = args.workers or len(cores())
    print(preprocess(args.input, args.output_prefix, encoder, workers=workers, log_interval=args.log_interval))
    if packing is not None:
        eod = build_tokenizer(**dataclasses.asdict(spec)).eod
        for prefix in (f"{args.output_prefix}_{key}" for key in args.json_keys):
            print(pack(f"{prefix}_document", f"{prefix}_packed", packing, eod))
    return 0


def _packing(args: argparse.Namespace) -> PackSpec | None:
    """The packing of the corpus.

    Raises:
        DataError: the flags contradict each other.
    """
    if args.pack_length is None:
        if args.upsample_long is not None or args.long_from is not None:
            raise DataError("--upsample-long and --long-from change what --pack-length packs: give it, too.")
        return None
    if not args.append_eod:
        raise DataError("--pack-length lays documents end to end: add --append-eod, which tells where each ends.")
    factor = 1.0 if args.upsample_long is None else args.upsample_long
    if factor < 1:
        raise DataError(f"--upsample-long is {factor:g}; it must be at least 1, as no document is left out.")
    return PackSpec(args.pack_length, args.long_from or args.pack_length, factor)
