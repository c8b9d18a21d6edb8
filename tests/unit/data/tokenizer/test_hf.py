"""Ordinary tokenizer.json files of each model: special tokens written in texts, unknown and dropped characters."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gptpar.cli.preprocess import main as preprocess
from gptpar.data.indexed import IndexedDataset
from gptpar.data.tokenizer import Tokenizer, build_tokenizer

pytest.importorskip("tokenizers")

SPACE = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", SPACE, "a", "b", "<", "/", "s", ">"]
ONE_BY_ONE = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in PIECES]}
WORD_LEVEL = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {piece: i for i, piece in enumerate(PIECES)}}
WORD_PIECE = WORD_LEVEL | {"type": "WordPiece", "continuing_subword_prefix": "", "max_input_chars_per_word": 100}
BPE = WORD_LEVEL | {"type": "BPE", "merges": [["<", "/"], ["</", "s"], ["</s", ">"]]}
BPE["vocab"] = BPE["vocab"] | {"</": 10, "</s": 11}


def tokenizer_of(folder: Path, model: dict[str, Any], special: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> Tokenizer:
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": PIECES.index(name), "content": name, **rules} for name in special]
    fields = {"version": "1.0", "added_tokens": added, "pre_tokenizer": ONE_BY_ONE, "model": model}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return build_tokenizer("HFTokenizer", tokenizer_model=str(folder))


@pytest.mark.parametrize("special", [("<unk>", "<s>", "</s>"), ()], ids=["special", "plain"])
@pytest.mark.parametrize(
    ("model", "ids"),
    [(UNIGRAM, [4, 6, 7, 8, 9, 5]), (WORD_LEVEL, [0]), (WORD_PIECE, [4, 6, 7, 8, 9, 5]), (BPE, [4, 11, 9, 5])],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_no_text_ends_its_document(model: dict[str, Any], ids: list[int], special: tuple[str, ...], tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, model, special)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.unknown) == (len(model["vocab"]), 2, 1, 0)
    assert tokenizer.encode("a</s>b") == ids
    assert not [text for text in ("</s>", "a </s> b", "b</s>", " </s>") if 2 in tokenizer.encode(text)]
    assert tokenizer.decode([2]) == "</s>"


def processed(folder: Path, texts: list[str], flags: str) -> list[list[int]]:
    corpus = folder / "c.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    where = f"--input {corpus} --output-prefix {folder / 'c'} --workers 1 --tokenizer-type HFTokenizer"
    assert preprocess([*where.split(), "--tokenizer-model", str(folder), *flags.split()]) == 0
    documents = IndexedDataset(f"{folder / 'c'}_text_document")
    return [documents.get(number).tolist() for number in range(len(documents))]


def test_lost_text_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = tokenizer_of(tmp_path, BPE | {"unk_token": None}, ("<s>", "</s>"))
    lost = {"\u00e9": 3, "\u00df": 1, "\n": 1, " ": 2}
    assert tokenizer.dropped(["a \u00e9\u00e9", "\u00df\u00e9 b\n"]) == Counter(lost)
    assert processed(tmp_path, ["a\u00e9b\u00e9", "\u00df", "a"], "--append-eod") == [[4, 5, 2], [4, 2]]
    assert "lost 3 characters that no token represents: '\u00e9' 2 times, '\u00df' 1 times" in capsys.readouterr().out
    other = tmp_path / "other"
    tokenizer_of(other, WORD_PIECE | {"continuing_subword_prefix": "##"})  # a space divides words
    assert processed(other, ["a\u00e9 b", "\u00df"], "") == [[0, 5], [0]]
    told = capsys.readouterr().out
    assert "lost what 2 tokens stand for: the vocabulary lacks it" in told and "no token represents" not in told
    assert processed(other, ["a b"], "") == [[4, 5]]
    assert "\nlost" not in capsys.readouterr().out


def test_prompts_begin_with_bos_where_the_file_puts_it_before_texts(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, UNIGRAM)
    assert (tokenizer.encode_prompt("ab"), tokenizer.encode_prompt("")) == ([4, 5], [1])
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    rule = {"type": "TemplateProcessing", "single": begin, "pair": begin, "special_tokens": tokens}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": rule}))
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(path))
    assert (tokenizer.encode_prompt("ab"), tokenizer.encode_prompt("")) == ([1, 4, 5], [1])
    assert tokenizer.encode("ab") == [4, 5]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(path))
    assert (tokenizer.encode_prompt("ab"), tokenizer.encode_prompt(""), tokenizer.bos) == ([4, 5], [2], None)
