"""Makes the tokenizer files of an export, which transformers, vLLM and lm-eval read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptpar.config import Flags, TokenizerConfig
from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.tokenizer.bpe import END_OF_TEXT
from gptpar.errors import ConfigError, TokenizerError
from gptpar.exchange.kept import kept_folder
from gptpar.exchange.sentencepiece_json import SentencePieceModel
from gptpar.exchange.tokenizer_check import require_same_ids
from gptpar.system.data_flags import TOKENIZERS


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
    copies = c.save_hf_interval is None or c.load_hf or kept_folder(Path(c.save or ""))
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
