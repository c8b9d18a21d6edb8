"""Hugging Face tokenizer.json files, run by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gptpar.data.tokenizer.base import TokenizerBase, decode_known, file_at, utf8
from gptpar.errors import TokenizerError
from gptpar.system.files import MAX_SMALL_BYTES, read_regular

# Names of the end-of-document token in published models, for folders that do not declare it.
COMMON_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class HFTokenizer(TokenizerBase):
    """A tokenizer.json, or a local folder that holds one. Nothing is downloaded.

    `eod` is the eos_token of the folder's tokenizer_config.json or special_tokens_map.json, or else the only
    well-known name (COMMON_EOD) in the vocabulary. Special tokens written in a text are encoded as ordinary
    characters, and none are added.
    """

    name = "HFTokenizer"
    options = ("tokenizer_model",)
    in_folder = "tokenizer.json"

    def __init__(self, tokenizer_model: str):
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError("HFTokenizer needs the tokenizers library: pip install 'gptpar[hf]'") from error

        super().__init__()
        path = file_at(tokenizer_model, self.in_folder)
        content = self._read("tokenizer_model", path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise TokenizerError(f"{path} holds no token: its vocabulary is empty; take the model's own tokenizer.json")
        self.vocab_size = max(vocab.values()) + 1
        self.eod = _find_eod(path, vocab)

    def encode(self, text: str) -> list[int]:
        utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return decode_known(ids, self.vocab_size, lambda run: self._tokenizer.decode(run, skip_special_tokens=False))


def _find_eod(path: Path, vocab: dict[str, int]) -> int:
    for sibling in ("tokenizer_config.json", "special_tokens_map.json"):
        declared = _eos_token(path.with_name(sibling))
        if declared in vocab:
            return vocab[declared]
    known = [token for token in COMMON_EOD if token in vocab]
    if len(known) != 1:
        found = f"holds {' and '.join(known)}" if known else f"holds none of {', '.join(COMMON_EOD)}"
        raise TokenizerError(
            f"{path} does not say which token ends a document ({found}); "
            'put a tokenizer_config.json with "eos_token" beside it'
        )
    return vocab[known[0]]


def _eos_token(path: Path) -> str:
    """The eos_token that a model's JSON file declares; "" if it declares none."""
    try:
        eos = json.loads(read_regular(path, MAX_SMALL_BYTES)).get("eos_token")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{path} is not a JSON object: {error}") from error
    return str(eos.get("content", "")) if isinstance(eos, dict) else str(eos or "")
