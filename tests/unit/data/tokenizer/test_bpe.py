"""GPT-2 BPE: a slow reference written from the paper, tiktoken and the kernel give the same ids, and texts are divided
where that changes nothing. On a small vocabulary and on GPT-2's own."""

import json
import random
from pathlib import Path

import pytest
import regex
import tiktoken

from gptpar.data.tokenizer import Tokenizer
from gptpar.data.tokenizer.bpe import _CUT, PIECES, BPEKernel, GPT2BPETokenizer, byte_alphabet
from gptpar.errors import TokenizerError
from tests.unit.data.tokenizer.vocabularies import GPT2, SAMPLE, build, small_vocabulary, write_files

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


ALPHABETS = [
    "abst'rve dlm \n",
    "aZ09 .,-'\t\n\r\x0b\x0c\x00\x1c\x7f",
    "ab1' \n\u00e9\u65e5\U0001f600\u0663\u00bd\u2028\u00a0\u0085\u3000\u0301",
    "a \n" * 8 + "\u00e9",
    [*"\u65e5\u00df 0\u0663\u00bd\t\r'_<|>-\u0301", *SAMPLE.split(" "), " the", " cat", " return"],
]
EDGES = ["", "'s", " 's", "'re've'll'd", "a \n", "x'\u00e9", " \u00e9 ", "\u00e9" * 40 + " a", "a\x00b"]
LONG = ["a" * 700, "=" * 257, " " * 300 + "x", "\n" * 256, "ab" * 128, "1" * 255 + "\u00e9", "the " * 200 + "\u00e9"]


def texts_of(alphabet: str | list[str], count: int, longest: int) -> list[str]:
    draw = random.Random(str(alphabet))
    return ["".join(draw.choices(alphabet, k=draw.randrange(longest))) for _ in range(count)]


def all_texts() -> list[str]:
    mixed = [text for alphabet in ALPHABETS for text in texts_of(alphabet, 300, 120)]
    return EDGES + LONG + mixed + [Path(__file__).read_text(encoding="utf-8")]


def words_of(text: str) -> list[tuple[str, ...]]:
    letter = {byte: character for character, byte in byte_alphabet().items()}
    return [tuple(letter[b] for b in piece.encode()) for piece in SPLIT.findall(text)]


def join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def reference_encode(text: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    rank = {pair: i for i, pair in enumerate(merges)}
    ids = []
    for word in words_of(text):
        while pairs := [p for p in zip(word, word[1:], strict=False) if p in rank]:
            word = join(word, min(pairs, key=rank.__getitem__))
        ids += [vocab[token] for token in word]
    return ids


def require_reference(tokenizer: Tokenizer, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    for text in [SAMPLE, *all_texts()[::10]]:
        ids = tokenizer.encode(text)
        assert ids == reference_encode(text, vocab, merges)
        assert tokenizer.decode(ids) == text


def test_equals_the_reference_on_a_small_vocabulary(tmp_path: Path):
    vocab, merges = small_vocabulary(25)
    tokenizer = write_files(tmp_path, vocab, merges)
    assert (tokenizer.vocab_size, tokenizer.eod) == (282, 281)
    require_reference(tokenizer, vocab, merges)


@pytest.mark.skipif(not GPT2.is_dir(), reason="GPT-2's vocabulary files are not beside the repository")
def test_equals_gpt2():
    tokenizer = build(GPT2)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    lines = (GPT2 / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    merges = [(left, right) for left, right in (line.split() for line in lines)]
    require_reference(tokenizer, json.loads((GPT2 / "encoder.json").read_text()), merges)


@pytest.mark.parametrize(
    ("content", "told"), [('{"\\ud800": 0}', "a token without a UTF-8 form"), ('{"a": ' + "[" * 100_000, "is not JSON")]
)
def test_a_vocabulary_that_cannot_be_is_a_sentence(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match=rf"--vocab-file .*vocab.json .*{told}"):
        GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))


@pytest.fixture(params=["small", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "small":
        return write_files(tmp_path, *small_vocabulary(25))
    if not GPT2.is_dir():
        pytest.skip("GPT-2's vocabulary files are not beside the repository")
    return build(GPT2)


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
    kernel = BPEKernel.build(ranks, plain.encode_ordinary)
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
