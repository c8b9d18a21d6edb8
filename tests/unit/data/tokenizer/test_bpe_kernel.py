"""The BPE kernel gives tiktoken's ids, whatever the text, and texts are divided where that changes nothing."""

import random
from pathlib import Path

import pytest
import tiktoken

from gptpar.data.tokenizer import bpe
from gptpar.data.tokenizer.base import Tokenizer
from gptpar.data.tokenizer.bpe import _CUT, PIECES, GPT2BPETokenizer, byte_alphabet
from tests.unit.data.tokenizer.vocabularies import GPT2, build, small_vocabulary, write_files

ALPHABETS = [
    "abst'rve dlm \n",
    "aZ09 .,-'\t\n\r\x0b\x0c\x00\x1c\x7f",
    "ab1' \n\u00e9\u65e5\U0001f600\u0663\u00bd\u2028\u00a0\u0085\u3000\u0301",
    "a \n" * 8 + "\u00e9",
]
EDGES = ["", "'s", " 's", "'re've'll'd", "a \n", "x'\u00e9", " \u00e9 ", "\u00e9" * 40 + " a", "a\x00b"]
LONG = ["a" * 700, "=" * 257, " " * 300 + "x", "\n" * 256, "ab" * 128, "1" * 255 + "\u00e9", "the " * 200 + "\u00e9"]


@pytest.fixture(params=["small", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "small":
        return write_files(tmp_path, *small_vocabulary(25))
    if not GPT2.is_dir():
        pytest.skip("GPT-2's vocabulary files are not beside the repository")
    return build(GPT2)


def texts_of(alphabet: str, count: int, longest: int) -> list[str]:
    draw = random.Random(alphabet)
    return ["".join(draw.choices(alphabet, k=draw.randrange(longest))) for _ in range(count)]


def all_texts() -> list[str]:
    mixed = [text for alphabet in ALPHABETS for text in texts_of(alphabet, 300, 120)]
    return EDGES + LONG + mixed + [Path(__file__).read_text(encoding="utf-8")]


def as_lists(tokenizer: Tokenizer, texts: list[str], after: int | None = None) -> list[list[int]]:
    tokens, lengths = tokenizer.encode_batch(texts, after)
    ids, ends = tokens.tolist(), lengths.cumsum().tolist()
    assert ends[-1] == len(ids)
    return [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def test_equals_tiktoken(tokenizer: Tokenizer):
    assert tokenizer.threads, "the kernel did not compile"
    texts = all_texts()
    expected = [tokenizer.encode(text) for text in texts]
    assert as_lists(tokenizer, texts) == expected
    assert [as_lists(tokenizer, [text])[0] for text in texts] == expected  # nothing lies behind a text's end
    ended = [ids + [tokenizer.eod] if ids else [] for ids in expected]
    assert as_lists(tokenizer, texts, tokenizer.eod) == ended


def test_a_vocabulary_whose_ids_do_not_begin_with_the_bytes():
    """Joining follows the ids; the bytes' own do not matter."""
    letters = {bytes([byte]): 1000 - byte for byte in byte_alphabet().values()}
    ranks = letters | {b"bc": 1001, b"ab": 1002, b"abc": 1003, b"ca": 1004}
    plain = tiktoken.Encoding("plain", pat_str=PIECES, mergeable_ranks=ranks, special_tokens={})
    kernel = bpe.BPEKernel.build(ranks, plain.encode_ordinary)
    assert kernel is not None
    for text in texts_of("abc", 200, 40):
        assert kernel.encode_batch([text.encode()])[0].tolist() == plain.encode_ordinary(text)


@pytest.mark.slow
def test_a_text_may_be_divided_at_every_cut(tokenizer: Tokenizer):
    assert isinstance(tokenizer, GPT2BPETokenizer)
    cuts = 0
    for text in all_texts():
        data, whole = text.encode(), tokenizer.encode(text)
        for match in _CUT.finditer(data[:1000], 1):
            left, right = data[: match.start()].decode(), data[match.start() :].decode()
            assert tokenizer.encode(left) + tokenizer.encode(right) == whole, (left[-20:], right[:20])
            cuts += 1
    assert cuts > 10_000
