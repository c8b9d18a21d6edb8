"""TikTokenizer against a slow reference: text is cut by the pattern, then the neighbours of least rank are joined."""

import base64
import json
from pathlib import Path

import pytest
import regex

from gptpar.data.tokenizer import build_tokenizer

TEXT = "Hello, HELLO hELlo's 1234 wörld日本 <unk></s>  x\r\n\n\t/// a//\n 😀 "
MERGES = [b"He", b"ll", b"Hell", b"Hello", b" x", b"12", b"23", b"\r\n", b"\n\n", b"//", b"EL", b"HE", b"LO", b"lo"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *MERGES])
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    return str(tmp_path / "vocab.json")


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while pairs := [
        (ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks
    ]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


# As Megatron-LM writes them.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize(("pattern", "special"), [("v1", 7), ("v2", 1000)])
def test_equals_the_reference(model: str, pattern: str, special: int) -> None:
    options = {"tiktoken_pattern": pattern, "tiktoken_num_special_tokens": special}
    tokenizer = build_tokenizer("TikTokenizer", tokenizer_model=model, vocab_size=special + 256 + 14, **options)
    ranks = {bytes([byte]): special + byte for byte in range(256)}
    ranks |= {token: special + 256 + i for i, token in enumerate(MERGES)}
    pieces = regex.findall(PATTERNS[pattern], TEXT)
    assert "".join(pieces) == TEXT
    ids = tokenizer.encode(TEXT)
    assert ids == [one for piece in pieces for one in merged(piece.encode(), ranks)]
    assert tokenizer.decode(ids) == TEXT and min(ids) >= special  # "</s>" in a text ends no document
    assert (tokenizer.vocab_size, tokenizer.eod) == (special + 270, 2)
    assert tokenizer.decode([0, 2, 6, special, special + 270, -1]) == "<unk></s><sep>\0\ufffd\ufffd"


def test_what_the_file_has_beyond_the_vocabulary_is_not_used(model: str) -> None:
    whole, part = (build_tokenizer("TikTokenizer", tokenizer_model=model, vocab_size=size) for size in (1270, 1258))
    assert whole.encode("Hello") == [1259] and part.encode("Hello") == [1256, 1257, 1000 + ord("o")]
    assert whole.decode([999]) == "<SPECIAL_999>"
    assert whole.identity() != part.identity()
    other = build_tokenizer("TikTokenizer", tokenizer_model=model, vocab_size=1270, tiktoken_pattern="v1")
    assert {key for key, value in other.identity().items() if value != whole.identity()[key]} == {"pattern"}
