"""Makes the tokenizer files of an export, which transformers, vLLM and lm-eval read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptpar.config import Flags, TokenizerConfig
from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.tokenizer.bpe import END_OF_TEXT
from gptpar.data.tokenizer.hf import load_tokenizer_json
from gptpar.errors import ConfigError, TokenizerError
from gptpar.exchange.kept import kept_folder
from gptpar.exchange.sentencepiece_json import SentencePieceModel
from gptpar.system.data_flags import TOKENIZERS

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


def tokenizer_files(config: TokenizerConfig, max_length: int) -> dict[str, bytes]:
    """File name -> contents; none for a run of bare token ids.

    A ``tokenizer.json`` that is made here gives the ids of the training; see :func:`require_same_ids`.

    Args:
        max_length: positions of the model.

    Raises:
        TokenizerError: a file is not where it was in training, or no ``tokenizer.json`` gives the same ids.
    """
    if config.tokenizer_type is None:
        return {}
    try:
        tokenizer = build_tokenizer(config.tokenizer_type, **config.options)
    except (ConfigError, TokenizerError) as error:
        raise TokenizerError(
            f"the tokenizer cannot be read ({error}): say where its files are now with --tokenizer-model, or "
            "--vocab-file and --merge-file, or leave the tokenizer out with --no-tokenizer"
        ) from None
    match tokenizer.name:
        case "HFTokenizer":
            return {"tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast"}), **tokenizer.files}
        case "GPT2BPETokenizer":
            files = _of_bpe(tokenizer.files["vocab.json"], tokenizer.files["merges.txt"], max_length)
        case "SentencePieceTokenizer" | "Llama2Tokenizer":
            files = _of_sentencepiece(tokenizer, max_length)
        case _:
            return {}
    require_same_ids(files["tokenizer.json"], tokenizer)
    return files


def missing_package(flags: Flags) -> Iterator[str]:
    """A sentence if a run's exports need a package that is not installed; those of an imported model copy files."""
    c, kind = flags.checkpoint, TOKENIZERS.get(flags.tokenizer.tokenizer_type or "")
    copies = c.load_hf or kept_folder(Path(c.save or ""))
    made = ("GPT2BPETokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
    if not copies and kind in made and find_spec("tokenizers") is None:
        yield (
            f"--save-hf-interval {c.save_hf_interval}: the export of a {kind} needs the tokenizers library: pip "
            "install 'gptpar[hf]', or leave the flag out."
        )


def _of_sentencepiece(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """The model's own file, and the same tokenizer as a ``tokenizer.json``, which transformers takes as it is.

    A bos token is named where texts began with it in training: lm-evaluation-harness begins with it, or else with eos.
    """
    content = tokenizer.files["tokenizer.model"]
    model = SentencePieceModel.parse(content)
    begin = tokenizer.bos if tokenizer.begins_texts else None
    special = {"bos_token": begin, "eos_token": tokenizer.eod, "unk_token": tokenizer.unknown}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **{name: model.pieces[number].text for name, number in special.items() if number is not None},
    }
    return {
        "tokenizer.model": content,
        "tokenizer.json": _json(model.tokenizer_json(begin)),
        "tokenizer_config.json": _json(settings),
    }


def _of_bpe(vocab: bytes, merges: bytes, max_length: int) -> dict[str, bytes]:
    """GPT-2's two files under transformers' names, and the same tokenizer as a ``tokenizer.json``."""
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "model_max_length": max_length,
        **special,
    }
    return {
        "vocab.json": vocab,
        "merges.txt": merges,
        "tokenizer.json": _json(_byte_level_bpe(json.loads(vocab), merges.decode())),
        "tokenizer_config.json": _json(settings),
        "special_tokens_map.json": _json(special),
    }


def _byte_level_bpe(vocab: Mapping[str, int], merges: str) -> dict[str, Any]:
    lines = [line for line in merges.replace("\r", "").split("\n") if line.strip() and not line.startswith("#version")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": vocab[END_OF_TEXT], "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": dict(vocab),
            "merges": [line.split(" ") for line in lines],
        },
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


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
