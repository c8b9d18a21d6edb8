"""GPT-2's vocabulary, and a small one that is made from a sentence."""

import json
from collections import Counter
from pathlib import Path

import regex

from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.tokenizer.bpe import byte_alphabet

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
GPT2 = Path(__file__).parents[5] / "shared" / "data" / "gpt2"
SAMPLE = "the cat sat on the mat; the cat's hat isn't that fat.\n    def the_cat(self):\n        return 12\n" * 3


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


def small_vocabulary(num_merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    words, merges = Counter(words_of(SAMPLE)), []
    for _ in range(num_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        words = Counter({join(word, best): count for word, count in words.items()})
        merges.append(best)
    tokens = [*byte_alphabet(), *(left + right for left, right in merges), "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}, merges


def write_files(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    (folder / "encoder.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return build(folder)


def build(folder: Path) -> Tokenizer:
    files = {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}
    return build_tokenizer("GPT2BPETokenizer", **files)
