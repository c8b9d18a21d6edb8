"""GPT-2's byte-level BPE from encoder.json and vocab.bpe, run by tiktoken.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and the two
files' format as published with GPT-2: a JSON object {token: id}, and one merge "left right" a line, best
first. Both write a byte as one printable character.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from gptpar.errors import TokenizerError
from gptpar.tokenizer.base import REPLACEMENT, TokenizerBase, utf8

END_OF_TEXT = "<|endoftext|>"

# How GPT-2 cuts text before merging; possessive quantifiers find the same pieces without backtracking.
PIECES = "|".join(
    [
        r"'(?:[sdmt]|ll|ve|re)",  # English contractions
        r" ?\p{L}++",
        r" ?\p{N}++",
        r" ?[^\s\p{L}\p{N}]++",
        r"\s++$",
        r"\s+(?!\S)",  # leaves the last blank to the word after it
        r"\s",
    ]
)


class GPT2BPETokenizer(TokenizerBase):
    """The ids of GPT-2 and of Megatron-LM's tokenizer of this name; GPT-2's files give a vocab_size of 50257.

    "<|endoftext|>" written in a text is encoded as ordinary characters.
    Letters newer than the Unicode version of the installed tiktoken count as punctuation.
    """

    name = "GPT2BPETokenizer"
    options = ("vocab_file", "merge_file")

    def __init__(self, vocab_file: str, merge_file: str):
        import tiktoken

        super().__init__()
        vocab = _parse_vocab(self._read("vocab_file", vocab_file), vocab_file)
        merges = _parse_merges(self._read("merge_file", merge_file), merge_file)
        if END_OF_TEXT not in vocab:
            raise TokenizerError(f"{vocab_file} has no {END_OF_TEXT}, which must end each document")
        self.eod = vocab[END_OF_TEXT]
        self.vocab_size = max(vocab.values()) + 1
        ranks = _mergeable_ranks(vocab, merges, vocab_file, merge_file)
        self._encoding = tiktoken.Encoding(self.name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens={})
        bytes_of = {i: token.encode() for token, i in vocab.items()}
        bytes_of |= {i: token for token, i in ranks.items()}
        self._bytes = [bytes_of.get(i, REPLACEMENT.encode()) for i in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        utf8(text)  # tiktoken would put U+FFFD without a word
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        unknown = REPLACEMENT.encode()
        parts = (self._bytes[i] if 0 <= i < self.vocab_size else unknown for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of the files stands for: itself if printable in Latin-1, else 256, 257,
    ...
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _parse_vocab(content: bytes, path: str) -> dict[str, int]:
    try:
        vocab = json.loads(content)
    except ValueError as error:
        raise TokenizerError(f"--vocab-file {path} is not JSON: {error}") from error
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise TokenizerError(
            f'--vocab-file {path} must be a JSON object {{"token": id, ...}} like GPT-2\'s encoder.json'
        )
    if len(set(vocab.values())) < len(vocab):
        raise TokenizerError(f"--vocab-file {path} gives the same id to two tokens")
    return vocab


def _parse_merges(content: bytes, path: str) -> list[tuple[str, str]]:
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"--merge-file {path} is not UTF-8: {error}") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise TokenizerError(f"--merge-file {path}, line {number}: {line!r} is not a pair of tokens")
        merges.append((pair[0], pair[1]))
    return merges


def _mergeable_ranks(
    vocab: dict[str, int], merges: list[tuple[str, str]], vocab_file: str, merge_file: str
) -> dict[bytes, int]:
    """tiktoken's table {bytes: id}. It merges the lowest id first, so ids must grow in the order of the
    merges.
    """
    alphabet = byte_alphabet()
    products = [left + right for left, right in merges]
    missing = [token for token in [*alphabet, *products] if token not in vocab]
    if missing:
        raise TokenizerError(
            f"{vocab_file} lacks {len(missing)} tokens that {merge_file} or plain bytes need, "
            f"the first {missing[0]!r}; the two files must belong together"
        )
    foreign = next((token for token in products if not alphabet.keys() >= set(token)), None)
    if foreign is not None:
        raise TokenizerError(f"{merge_file}: {foreign!r} holds a character that stands for no byte")
    ids = [vocab[token] for token in products]
    if any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)):
        raise TokenizerError(
            f"the ids in {vocab_file} do not follow the order of the merges in {merge_file}, as GPT-2's do; "
            "use HFTokenizer with a tokenizer.json instead"
        )
    tokens = [*alphabet, *products]
    return {bytes(alphabet[c] for c in token): vocab[token] for token in tokens}
