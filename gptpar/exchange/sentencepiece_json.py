"""Writes a SentencePiece model as the ``tokenizer.json`` with the same ids, which transformers and vLLM read.

transformers would make such a file itself from a ``tokenizer.model``, but with the settings of Llama 2 for every model:
it puts a space before the text, for instance, whatever the model says.

Sources: sentencepiece's ``src/sentencepiece_model.proto`` (numbers of the fields), ``src/normalizer.cc`` (order of the
normalisation), ``src/bpe_model.cc`` and ``src/unigram_model.cc`` (which pieces a text may have).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gptpar.errors import TokenizerError

SPACE = "\u2581"
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4
_KINDS = {UNIGRAM: "unigram", BPE: "BPE", WORD: "word", CHAR: "character"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNREACHABLE = 1000.0
"""Difference of the scores of control pieces and bytes from all others: no text prefers one of them."""


@dataclass(frozen=True)
class VocabularyPiece:
    """An entry of the vocabulary; ``kind`` is NORMAL, CONTROL and so on."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a ``tokenizer.model`` on which encoding depends.

    Attributes:
        charsmap: the normalisation of characters, in SentencePiece's form; empty: none.
        prefix: whether a space is put before each text.
        trims: whether spaces at the ends, and all but one of a row of spaces, are removed.
    """

    pieces: Sequence[VocabularyPiece]
    kind: int
    byte_fallback: bool
    charsmap: bytes
    prefix: bool
    trims: bool

    @staticmethod
    def parse(content: bytes) -> SentencePieceModel:
        """The model of a file that SentencePiece has read.

        Raises:
            TokenizerError: it has a setting that ``tokenizer.json`` cannot say.
        """
        pieces, trainer, normalizer = [], {}, {}
        for number, value in _fields(content):
            if number == 1:
                pieces.append(_piece(dict(_fields(value))))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        kind = trainer.get(3, UNIGRAM)
        unsaid = [f"is of the {_KINDS.get(kind, 'unknown')} type"] * (kind not in (UNIGRAM, BPE, CHAR))
        unsaid += ["puts spaces behind words"] * bool(trainer.get(24, 0))
        unsaid += ["does not write spaces as U+2581"] * (not normalizer.get(5, 1))
        if unsaid:
            raise TokenizerError(
                f"the SentencePiece model {' and '.join(unsaid)}, which no tokenizer.json can say: leave the tokenizer "
                "out with --no-tokenizer"
            )
        return SentencePieceModel(
            pieces=pieces,
            kind=kind,
            byte_fallback=bool(trainer.get(35, 0)),
            charsmap=normalizer.get(2, b""),
            prefix=bool(normalizer.get(3, 1)),
            trims=bool(normalizer.get(4, 1)),
        )

    def tokenizer_json(self, first: int | None) -> dict[str, Any]:
        """The contents of a ``tokenizer.json``.

        Args:
            first: id that begins each text; ``None``: none does.
        """
        steps = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(self.charsmap).decode()}]
        steps = steps if self.charsmap else []
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")] if self.trims else []
        steps += [_replace({"String": " "}, SPACE)]
        steps += [_replace({"Regex": rf"{SPACE}+\z"}, "")] if self.trims else []
        steps += [{"type": "Prepend", "prepend": SPACE}] if self.prefix else []
        back = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
        back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self.prefix else []
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": self._isolating(),
            "post_processor": None if first is None else _beginning(first, self.pieces[first].text),
            "decoder": {"type": "Sequence", "decoders": back},
            "model": self._unigram() if self.kind == UNIGRAM else self._bpe(),
        }

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Control pieces are special; BPE finds user-defined ones in any text before others."""
        for number, piece in enumerate(self.pieces):
            if piece.kind in (UNKNOWN, CONTROL) or (piece.kind == USER_DEFINED and self.kind != UNIGRAM):
                special = piece.kind != USER_DEFINED
                rules = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
                yield {"id": number, "content": piece.text, **rules, "normalized": not special, "special": special}

    def _isolating(self) -> dict[str, Any] | None:
        """The rule that parts characters without pieces: Unigram would find bytes' names, ``<0x41>``, with them."""
        there = {character for piece in self.pieces if piece.kind in (NORMAL, USER_DEFINED) for character in piece.text}
        absent = "".join(sorted({*"<0x123456789ABCDEF>"} - there))
        if self.kind != UNIGRAM or not self.byte_fallback or not absent:
            return None
        return {"type": "Split", "pattern": {"Regex": f"[{absent}]"}, "behavior": "Isolated", "invert": False}

    def _unigram(self) -> dict[str, Any]:
        written = (NORMAL, USER_DEFINED)
        lowest = min((piece.score for piece in self.pieces if piece.kind in written), default=0.0)
        vocab = [[one.text, one.score if one.kind in written else lowest - UNREACHABLE] for one in self.pieces]
        return {"type": "Unigram", "unk_id": self._unknown(), "vocab": vocab, "byte_fallback": self.byte_fallback}

    def _bpe(self) -> dict[str, Any]:
        texts = {piece.text for piece in self.pieces if piece.kind in (NORMAL, USER_DEFINED, UNUSED)}
        products = [piece for piece in self.pieces if piece.kind == NORMAL and len(piece.text) > 1]
        products = sorted(products, key=lambda piece: -piece.score) if self.kind == BPE else []
        halves = ((one.text[:at], one.text[at:]) for one in products for at in range(1, len(one.text)))
        merges = [[left, right] for left, right in halves if left in texts and right in texts]
        return {
            "type": "BPE",
            **dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix")),
            "unk_token": self.pieces[self._unknown()].text,
            "fuse_unk": True,
            "byte_fallback": self.byte_fallback,
            "ignore_merges": False,
            "vocab": {piece.text: number for number, piece in enumerate(self.pieces)},
            "merges": merges,
        }

    def _unknown(self) -> int:
        return next(number for number, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _beginning(first: int, name: str) -> dict[str, Any]:
    """The rule that puts a token before each text."""
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    a, b = ({"Sequence": {"id": one, "type_id": 0}} for one in "AB")
    tokens = {name: {"id": name, "ids": [first], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": [begin, a], "pair": [begin, a, begin, b], "special_tokens": tokens}


def _piece(fields: dict[int, Any]) -> VocabularyPiece:
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return VocabularyPiece(fields.get(1, b"").decode(), score, fields.get(3, NORMAL))


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: an int, or the bytes of anything else.

    Source: protobuf's "Encoding" page.
    """
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(content, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(content, at)
        else:
            size = {1: 8, 5: 4}[wire]
        yield number, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it)."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
