"""GPT-2 BPE against a slow reference written from the paper, on a small vocabulary and on GPT-2's own."""

import json
import random
from pathlib import Path

import pytest
import regex

from gptpar.data.tokenizer import Tokenizer
from gptpar.data.tokenizer.bpe import GPT2BPETokenizer, byte_alphabet
from gptpar.errors import TokenizerError
from tests.unit.data.tokenizer.vocabularies import GPT2, SAMPLE, build, small_vocabulary, write_files

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
CHARACTERS = "abcdeABé日本😀ß 0123٣½ \t\n\r\u2028\u00a0\x00'.,!?_<|>-\u0301"


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


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = SAMPLE.split(" ")
    return [
        "".join(draw.choice(words) if draw.random() < 0.3 else draw.choice(CHARACTERS) for _ in range(60))
        for _ in range(count)
    ]


def require_reference(tokenizer: Tokenizer, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    own = Path(__file__).read_text(encoding="utf-8")
    for text in [SAMPLE, own, "", " ", "\n\n  x", " " * 37, "a" * 50, *random_texts(200)]:
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
