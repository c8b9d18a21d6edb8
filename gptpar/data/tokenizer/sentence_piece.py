"""Tokenizers of SentencePiece models (Kudo and Richardson, 2018, arXiv:1808.06226), Llama 2's included."""

from __future__ import annotations

from collections.abc import Iterable

from gptpar.data.tokenizer.base import Tokenizer, decode_known, file_at, utf8
from gptpar.errors import TokenizerError


class SentencePieceTokenizer(Tokenizer):
    """The model's ids, as of Megatron-LM's GPTSentencePieceTokenizer; ``eod`` is the model's eos id.

    Megatron's SentencePieceTokenizer also appends special ids for BERT and T5, which a GPT does not need. SentencePiece
    writes a space as U+2581, so that a U+2581 in a text decodes to a space, with any model.
    """

    name = "SentencePieceTokenizer"
    options = ("tokenizer_model",)
    in_folder = "tokenizer.model"
    file_names = {"tokenizer_model": in_folder}
    may_drop = True

    def __init__(self, tokenizer_model: str):
        import sentencepiece

        super().__init__()
        content = self._read("tokenizer_model", file_at(tokenizer_model, self.in_folder))
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, ValueError) as error:
            raise TokenizerError(f"--tokenizer-model {tokenizer_model} is not a SentencePiece model") from error
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id()
        self.bos, self.unknown = (one if one >= 0 else None for one in (self._model.bos_id(), self._model.unk_id()))
        if self.eod < 0:
            raise TokenizerError(
                f"{tokenizer_model} has no eos piece, which must end each document; train it with eos_id"
            )

    def encode(self, text: str) -> list[int]:
        utf8(text)
        return self._model.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        return decode_known(ids, self.vocab_size, self._model.DecodeIds)


class Llama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's Llama2Tokenizer: a SentencePiece model whose bos id begins each text.

    Raises:
        TokenizerError: the model has no bos piece.
    """

    name = "Llama2Tokenizer"
    begins_texts = True

    def __init__(self, tokenizer_model: str):
        super().__init__(tokenizer_model)
        if self.bos is None:
            raise TokenizerError(
                f"{tokenizer_model} has no bos piece, with which a Llama2Tokenizer begins each text; take "
                "--tokenizer-type SentencePieceTokenizer"
            )

    def encode(self, text: str) -> list[int]:
        assert self.bos is not None
        return [self.bos, *super().encode(text)]
