"""Makes the tokenizer files of an export, which transformers, vLLM and lm-eval read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptpar.config import TokenizerConfig
from gptpar.data.tokenizer.base import file_at
from gptpar.data.tokenizer.bpe import END_OF_TEXT
from gptpar.data.tokenizer.hf import HFTokenizer
from gptpar.data.tokenizer.sentence_piece import SentencePieceTokenizer
from gptpar.errors import TokenizerError
from gptpar.system.data_flags import TOKENIZERS
from gptpar.system.files import lies_in, read_regular

BESIDE_TOKENIZER_JSON = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja"),
)


def tokenizer_files(config: TokenizerConfig, max_length: int) -> dict[str, bytes]:
    """File name -> contents; none for a run of bare token ids.

    Args:
        max_length: positions of the model.

    Raises:
        TokenizerError: a file is not where it was in training.
    """
    match TOKENIZERS.get(config.tokenizer_type or ""):
        case "HFTokenizer":
            return _of_tokenizer_json(file_at(str(config.tokenizer_model), HFTokenizer.in_folder))
        case "GPT2BPETokenizer":
            return _of_bpe(_read(config.vocab_file), _read(config.merge_file), max_length)
        case "SentencePieceTokenizer":
            settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False}
            model = file_at(str(config.tokenizer_model), SentencePieceTokenizer.in_folder)
            return {"tokenizer.model": _read(model), "tokenizer_config.json": _json(settings)}
        case _:
            return {}


def _of_tokenizer_json(path: Path) -> dict[str, bytes]:
    files = {"tokenizer.json": _read(path)}
    beside = [one for one in map(path.with_name, BESIDE_TOKENIZER_JSON) if one.is_file() and one != path]
    files |= {one.name: _read(one) for one in beside if lies_in(one, path.parent)}
    if "tokenizer_config.json" not in files:
        files["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast"})
    return files


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


def _read(path: str | Path | None) -> bytes:
    try:
        return read_regular(str(path))
    except OSError as error:
        raise TokenizerError(
            f"the tokenizer's file {path} cannot be read ({error.strerror}): say where it is now with "
            "--tokenizer-model, or --vocab-file and --merge-file, or leave the tokenizer out with --no-tokenizer"
        ) from None


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
