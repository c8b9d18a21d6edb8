"""``gptpar preprocess``: turn text into .bin/.idx data sets."""

from __future__ import annotations

import dataclasses

from gptpar.cli.flags import parser_of
from gptpar.data.preprocess import Encoder, TokenizerSpec, preprocess
from gptpar.data.readers import FORMATS
from gptpar.data.tokenizer.tik import PATTERNS
from gptpar.system.data_flags import TIKTOKEN, TOKENIZER_FILES, TOKENIZER_TYPES
from gptpar.system.host import cores


def main(argv: list[str]) -> int:
    """Tokenize, and print a summary."""
    types = {"types": TOKENIZER_TYPES, "types_text": ", ".join(TOKENIZER_TYPES)}
    facts = {**types, **TOKENIZER_FILES, **TIKTOKEN, "formats": FORMATS, "patterns": tuple(PATTERNS)}
    args = parser_of("preprocess", **facts).parse_args(argv)
    spec = TokenizerSpec(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TokenizerSpec)})
    encoder = Encoder(spec, tuple(args.json_keys), args.append_eod, args.skip_bad_lines, args.prepend_bos)
    workers = args.workers or len(cores())
    print(preprocess(args.input, args.output_prefix, encoder, workers=workers, log_interval=args.log_interval))
    return 0
