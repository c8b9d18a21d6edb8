"""Compares the tokenizer of an export with that of the training, on a few thousand odd texts."""

from __future__ import annotations

import random
from collections.abc import Iterator

from gptpar.data.tokenizer import Tokenizer
from gptpar.data.tokenizer.hf import load_tokenizer_json
from gptpar.errors import TokenizerError

NUM_RANDOM = 1000
"""Texts of each of three random kinds."""

_BY_HAND = (
    *("import os", " a", "a ", "  a  b  ", "\n", "\r\n\r\n", "\t\tx", "a\tb\n", " ", "   "),
    *("\u2581", "a\u2581b", "\u2581\u2581 x", "don't I'll WE'RE 'tis", "1234567890 3.14 1,000", "x=1;y==2;;z===3"),
    *("a" * 300, " " * 300, "=" * 100, "\n" * 100, "\0", "a\0b", "\x01\x7f\x85", "\u00a0\u2003\u3000x"),
    *("\u200b\u200d\ufeff", "\u2028\u2029", "\ufffd\uffff", "\U0010ffff", "e\u0301 \u00e9 \ufb01 \u2460 \uff21"),
    *("\u0130\u0131\u017f\u1e9e", "\ud55c\uad6d \u4e2d\u6587 \u65e5\u672c", "\u0905\u0928\u0941"),
    *("\U0001f600\U0001f3fd\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "<0x41><0x00>", "<0x4"),
    "Hello, World!\n\tx -= 1\n",
)
_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz    ABC.,'\n",
    "<>/|[](){}=+-*#@!?\"'`~^&%$\\_:; \t\n0123456789ax",
    "aZ \t\n\r\0\x0b\x1f\x7f\u00a0\u00ad\u0301\u0308\u05d0\u0628\u0e01\u1100\u2009\u200d\u2028\u2581"
    "\u3042\u4e00\uac00\ufb01\uff41\ufffd\U0001d400\U0001f600\U0001f3fb\U000e0041",
)


def odd_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts with all that tokenizers treat specially; the same in each call, for the same tokenizer."""
    generator = random.Random(0)
    yield from _BY_HAND
    for alphabet in _ALPHABETS:
        for _ in range(NUM_RANDOM):
            yield "".join(generator.choices(alphabet, k=generator.randint(1, 40)))
    for _ in range(NUM_RANDOM):
        ids = generator.choices(range(tokenizer.vocab_size), k=generator.randint(1, 12))
        yield tokenizer.decode(ids)


def require_same_ids(content: bytes, tokenizer: Tokenizer) -> None:
    """Check that a ``tokenizer.json`` gives the ids of the training.

    Texts with names of special tokens are left out: transformers reads the token there, gptpar ordinary text.

    Raises:
        TokenizerError: a text has other ids, or the tokenizers library is not installed.
    """
    written = load_tokenizer_json(content, "the tokenizer.json of the export")
    special = [token.content for token in written.get_added_tokens_decoder().values() if token.special]
    checked = [text for text in odd_texts(tokenizer) if not any(name in text for name in special)]
    differ = [text for text in checked if written.encode(text).ids != tokenizer.encode(text)]
    if differ:
        text = min(differ, key=len)
        here, there = tokenizer.encode(text), written.encode(text).ids
        raise TokenizerError(
            f"{len(differ):,} of {len(checked):,} odd texts have other ids in transformers than in training; {text!r} "
            f"has {there}, and in training {here}: leave the tokenizer out with --no-tokenizer"
        )
