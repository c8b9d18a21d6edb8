"""Training SentencePiece: nothing is lost, and the same input gives the same model."""

import io
import json
import random
import tokenize
from pathlib import Path

import pytest

from gptpar.cli.train_tokenizer import main
from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.tokenizer.train import train
from gptpar.errors import DataError, TokenizerError

SOURCES = [Path(module.__file__).read_text(encoding="utf-8") for module in (json, tokenize, random, io)]
HARD_TEXTS = [
    "\tif x:\n\t\treturn  y\n\n\n    # é日本😀\u2028\u00a0\r\n",
    "  leading and trailing  ",
    " ",
    "\n",
    "",
    "\x00\x7f\u0301",
    "<s></s><unk><0x41>",
    "NFC é and NFD e\u0301, ﬁ, ２",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "my.model"
    path.write_bytes(train(SOURCES, 600, model_type=request.param))
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(path))


def test_ids(tokenizer: Tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 2)
    for text in [*SOURCES, *HARD_TEXTS]:
        ids = tokenizer.encode(text)
        assert not {0, 1, tokenizer.eod} & set(ids) and max(ids, default=0) < 600
    assert len(tokenizer.encode(SOURCES[0])) < len(SOURCES[0]) / 2
    assert tokenizer.encode("\x00") == [3]  # the bytes are the ids from 3 on
    assert tokenizer.decode([3 + 0xC3, 3 + ord("x"), tokenizer.eod, 600, -1]) == "\ufffdx\ufffd\ufffd"
    with pytest.raises(TokenizerError, match="no UTF-8 form"):
        tokenizer.encode("\ud800")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"body": text}) + "\n" for text in SOURCES))
    arguments = ["--input", str(corpus), "--json-key", "body", "--vocab-size", "500"]
    assert main([*arguments, "--model-prefix", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert f"wrote {tmp_path / 'a.model'}: 500 bpe pieces, eod 2" in captured.out
    assert captured.err == ""
    assert main([*arguments, "--output", str(tmp_path / "b.model")]) == 0
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    corpus.write_text("\n")
    with pytest.raises(DataError, match="no text"):
        main([*arguments, "--output", str(tmp_path / "c.model")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.model", "b.model", "corpus.jsonl"]
