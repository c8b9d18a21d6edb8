"""Hugging Face tokenizer.json files, run by the ``tokenizers`` library."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gptpar.data.tokenizer.base import Tokenizer, decode_known, file_at, utf8
from gptpar.errors import TokenizerError

# Names of the end-of-document token in published models, for folders that do not declare it.
COMMON_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
DECLARING = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that say which token is which."""


class HFTokenizer(Tokenizer):
    """A tokenizer.json, or a local folder that holds one. Nothing is downloaded.

    ``eod`` is the eos_token of the folder's tokenizer_config.json or special_tokens_map.json, or else the only
    well-known name (COMMON_EOD) in the vocabulary; ``bos`` is their bos_token, with which documents begin. Special
    tokens written in a text are encoded as ordinary characters. None are added, except that a prompt begins with
    ``bos`` where the file's own rule puts it before each text.
    """

    name = "HFTokenizer"
    options = ("tokenizer_model",)
    in_folder = "tokenizer.json"
    file_names = {"tokenizer_model": in_folder}
    beside = (*DECLARING, "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
    may_drop = True

    def __init__(self, tokenizer_model: str):
        super().__init__()
        path = self._path = file_at(tokenizer_model, self.in_folder)
        content = self._read("tokenizer_model", path)
        self._tokenizer = load_tokenizer_json(content, str(path))
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise TokenizerError(f"{path} holds no token: its vocabulary is empty; take the model's own tokenizer.json")
        self.vocab_size = max(vocab.values()) + 1
        self.eod = self._find_eod(vocab)
        self.bos = vocab.get(self._declared("bos_token", vocab))
        model = json.loads(content)["model"]
        unknown = vocab.get(model.get("unk_token") or "", model.get("unk_id"))
        self.unknown = unknown if type(unknown) is int else None
        added = self._tokenizer.get_added_tokens_decoder()
        names = {token.content for number, token in added.items() if token.special or number == self.eod}
        names.add(self._tokenizer.id_to_token(self.eod))
        self._encoder = self._tokenizer
        if self._can_be_written(names, vocab):
            self._encoder = load_tokenizer_json(_renamed(content, names), str(path))

    def _can_be_written(self, names: Collection[str], vocab: Mapping[str, int]) -> bool:
        """Whether a text can have the id of a token that no text shall have."""
        numbers = {vocab[name] for name in names}
        for text in (f"{before}{name}{after}" for name in names for before in ("", " ", "a") for after in ("", " b")):
            with suppress(TokenizerError):  # it has no token for one of these letters
                if numbers & set(self.encode(text)):
                    return True
        return False

    def encode(self, text: str) -> list[int]:
        utf8(text)
        with _errors_told(f"{self._path} has neither tokens for all characters nor one for unknown text"):
            return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_document(self, text: str) -> list[int]:
        return super().encode_document(text) if self.bos is None else [self.bos, *self.encode(text)]

    def encode_prompt(self, text: str) -> list[int]:
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        return self.encode_document(text) if added[:1] == [self.bos] else super().encode_prompt(text)

    def decode(self, ids: Iterable[int]) -> str:
        return decode_known(ids, self.vocab_size, lambda run: self._tokenizer.decode(run, skip_special_tokens=False))

    def _find_eod(self, vocab: dict[str, int]) -> int:
        declared = self._declared("eos_token", vocab)
        if declared:
            return vocab[declared]
        known = [token for token in COMMON_EOD if token in vocab]
        if len(known) != 1:
            found = f"holds {' and '.join(known)}" if known else f"holds none of {', '.join(COMMON_EOD)}"
            raise TokenizerError(
                f"{self._path} does not say which token ends a document ({found}); "
                'put a tokenizer_config.json with "eos_token" beside it'
            )
        return vocab[known[0]]

    def _declared(self, key: str, vocab: dict[str, int]) -> str:
        """The token of the vocabulary that the files beside declare; "" if they declare none."""
        for name in DECLARING:
            try:
                value = json.loads(self.files.get(name, b"{}")).get(key)
            except (ValueError, AttributeError, RecursionError) as error:
                raise TokenizerError(f"{self._path.with_name(name)} is not a JSON object: {error}") from error
            token = str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
            if token in vocab:
                return token
        return ""


def load_tokenizer_json(content: bytes, name: str) -> Any:
    """A tokenizer of the ``tokenizers`` library that takes no special tokens from a text.

    Args:
        name: the file's name in messages.

    Raises:
        TokenizerError: the library is not installed, or refuses the file.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(f"{name} needs the tokenizers library: pip install 'gptpar[hf]'") from error
    with _errors_told(f"{name} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def _errors_told(what: str) -> Iterator[None]:
    """Turn the library's errors into ours: bare exceptions, and panics of its Rust code, which are no exceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {error}") from error


def _renamed(content: bytes, names: Collection[str]) -> bytes:
    """The tokenizer with other names of special tokens, which no text can hold; all ids stay.

    A vocabulary finds a special token's name in a text where the model looks for whole words (WordLevel), or for the
    likeliest pieces (Unigram).
    """
    fields = json.loads(content)
    new = {name: f"\0{secrets.token_hex(16)}\0" for name in names}
    model = fields["model"]
    for token in fields.get("added_tokens") or ():
        token["content"] = new.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {new.get(piece, piece): number for piece, number in model["vocab"].items()}
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    if "merges" in model:
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [pair for pair in pairs if not new.keys() & {*pair, "".join(pair)}]
    return json.dumps(fields | {"post_processor": None}).encode()
