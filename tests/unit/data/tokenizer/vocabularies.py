"""GPT-2's vocabulary, and a small one that is made from a sentence."""

import json
from pathlib import Path

from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.tokenizer.bpe import byte_alphabet

GPT2 = Path(__file__).parents[5] / "shared" / "data" / "gpt2"
SAMPLE = "the cat sat on the mat; the cat's hat isn't that fat.\n    def the_cat(self):\n        return 12\n" * 3
MERGES = (
    "_ _|a t|t h|_ th|_th e|c at|__ __|__ _|_ cat|____ ___|_th at|_ s|_s at|_ r|_r e|_re t|_ret u|_retu r|_retur n|"
    "_ o|_o n|_ m|_m at|_ i|_i s"
)
"""The most frequent pairs of ``SAMPLE``, each with those before it joined; _ is a space."""


def small_vocabulary(num_merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """At most 25 merges."""
    lines = MERGES.replace("_", "\u0120").split("|")[:num_merges]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
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
