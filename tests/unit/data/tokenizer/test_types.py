"""build_tokenizer, and the tokenizers that are not BPE or SentencePiece."""

from pathlib import Path

import pytest

from gptpar.data.tokenizer import build_tokenizer
from gptpar.errors import TokenizerError


def test_null_tokenizer_is_megatrons():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 3 0\n99\t3 ") == [3, 0, 99, 3]
    assert tokenizer.decode([3, 0, 100]) == "3 0 100"
    assert tokenizer.identity() == {"type": "NullTokenizer", "vocab_size": 101, "eod": 100, "sha256": {}}


def test_byte_tokenizer():
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tokenizer.decode([97, 0xC3, 98, 256, 257, -1]) == "a\ufffdb\ufffd\ufffd"
    with pytest.raises(TokenizerError, match="no UTF-8 form"):
        tokenizer.encode("\udc80")


def test_hf_tokenizer(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab"])}
    written = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    written.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = tokenizers.decoders.ByteLevel()
    written.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    written.add_special_tokens(["</s>"])
    written.enable_truncation(2)
    written.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(path))
        assert (tokenizer.vocab_size, tokenizer.eod) == (258, 257)
        assert tokenizer.encode("abab") == [256, 256]  # nothing added, nothing cut off
        text = "aab é\n</s>\tab"
        assert 257 not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode([256, 258, -1, 256]) == "ab\ufffd\ufffdab"
