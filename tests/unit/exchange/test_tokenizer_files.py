"""Tokenizer files of an export give the ids of the training, in transformers, too."""

import dataclasses
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from gptpar.config import TokenizerConfig
from gptpar.data.tokenizer import build_tokenizer
from gptpar.data.tokenizer.train import train
from gptpar.errors import TokenizerError
from gptpar.exchange.hf_export import ExportOptions, prepare_export
from gptpar.exchange.hf_import import tokenizer_in
from gptpar.exchange.tokenizer_files import odd_texts, tokenizer_files
from tests.unit.run.saved_runs import saved

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "import os, sys",
    "    def run(self) -> int:",
    "return os.path.join(a, b)",
    "Grüße an die Welt",
    "x = [1, 2, 3]",
] * 9
IDENTITY = {"normalization_rule_name": "identity"}
LLAMA = IDENTITY | {"byte_fallback": True, "remove_extra_whitespaces": False}
BARE = LLAMA | {"add_dummy_prefix": False}
USER = {"user_defined_symbols": ["\u2581\u2581", "<sep>"]}


def config_of(folder: Path, content: bytes, kind: str = "SentencePieceTokenizer") -> TokenizerConfig:
    (folder / "tokenizer.model").write_bytes(content)
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(folder))


def trained(kind: str, **settings: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type=kind, minloglevel=2, num_threads=1,
        vocab_size=340, hard_vocab_limit=False, **settings,
    )  # fmt: skip
    return model.getvalue()


def test_the_trainers_models_keep_their_ids(tmp_path: Path) -> None:
    config = config_of(tmp_path, train(TEXTS, 300))
    files = tokenizer_files(config, 16)
    written = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    training = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path))
    ids = training.encode("import os")
    assert written.encode("import os").ids == ids and written.decode(ids) == "import os"
    assert written.encode("\u00e9").ids == [3 + 0xC3, 3 + 0xA9]
    assert json.loads(files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16,
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("bpe", {"treat_whitespace_as_suffix": True}, "puts spaces behind words, which no tokenizer.json can say: "),
        # SentencePiece's default replaces the longest text that it knows; the library replaces whole graphemes.
        ("unigram", {}, r"[1-9]\d* of 4,\d+ odd texts have other ids in transformers than in training"),
    ],
)
def test_what_no_tokenizer_json_can_say_is_told(kind: str, settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, trained(kind, **settings))
    with pytest.raises(TokenizerError, match=f"{told}.*--no-tokenizer"):
        tokenizer_files(config, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("unigram", IDENTITY, "Llama2Tokenizer"),
        ("bpe", LLAMA, "Llama2Tokenizer"),
        ("char", BARE, "SentencePieceTokenizer"),
        ("bpe", BARE | USER, "Llama2Tokenizer"),
        ("unigram", BARE | USER, "SentencePieceTokenizer"),
    ],
    ids=["trims", "llama", "bare", "user", "user of unigram"],
)
def test_transformers_gives_the_same_ids(kind: str, settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    out.mkdir()
    for file, content in tokenizer_files(config_of(tmp_path, trained(kind, **settings), name), 16).items():
        (out / file).write_bytes(content)
    reader = transformers.AutoTokenizer.from_pretrained(out)
    training = build_tokenizer(name, tokenizer_model=str(tmp_path))
    texts = [text for text in odd_texts(training) if not any(one in text for one in ("<s>", "</s>", "<unk>"))]
    assert len(texts) > 3500
    assert [reader(text).input_ids for text in texts] == [training.encode(text) for text in texts]
    assert (reader.eos_token_id, reader.bos_token_id) == (2, 1 if name == "Llama2Tokenizer" else None)


@pytest.mark.slow
def test_a_folder_with_tokenizer_model_alone_keeps_its_beginning_of_texts(tmp_path: Path) -> None:
    """As transformers reads it: a text begins with bos if tokenizer_config.json says so."""
    content = trained("bpe", **LLAMA)
    (tmp_path / "tokenizer.model").write_bytes(content)
    ids = sentencepiece.SentencePieceProcessor(model_proto=content).EncodeAsIds("import os")
    for settings in (None, {}, {"add_bos_token": False}, {"add_bos_token": True}):
        begin = [1] if settings and settings["add_bos_token"] else []
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        config = tokenizer_in(tmp_path)
        assert config is not None
        files = tokenizer_files(config, 16)
        written = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        assert written.encode("import os").ids == begin + ids and files["tokenizer.model"] == content
        assert ("bos_token" in json.loads(files["tokenizer_config.json"])) is bool(begin)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "begin"), [("Llama2Tokenizer", 1), ("SentencePieceTokenizer", 2)])
def test_config_json_says_with_which_token_documents_begin(kind: str, begin: int, tmp_path: Path) -> None:
    tokenizer = dataclasses.asdict(config_of(tmp_path, trained("bpe", **LLAMA), kind))

    def change(meta: dict[str, Any]) -> None:
        meta["config"]["tokenizer"] |= tokenizer
        digest = hashlib.sha256((tmp_path / "tokenizer.model").read_bytes()).hexdigest()
        meta["tokenizer"] = {"type": kind, "vocab_size": 60, "eod": 2, "sha256": {"tokenizer_model": digest}}

    path = saved(tmp_path / "run", change=change)
    for options in (ExportOptions(), ExportOptions(with_tokenizer=False)):
        export = prepare_export(path, tmp_path / "out", options)
        for name in ("config.json", "generation_config.json"):
            fields = json.loads(export.texts[name])
            assert (fields["bos_token_id"], fields["eos_token_id"]) == (begin, 2)
