"""Where tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptpar.config.fields import flag

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HFTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


@dataclass(frozen=True)
class DataConfig:
    """Data sets in Megatron's .bin/.idx format, or synthetic tokens."""

    data_path: tuple[str, ...] | None = flag(
        None, "prefixes of .bin/.idx pairs, or WEIGHT PREFIX pairs to blend", metavar="PREFIX"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for training alone", metavar="PREFIX")
    valid_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for validation alone", metavar="PREFIX")
    test_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for testing alone", metavar="PREFIX")
    split: str | None = flag(None, "shares of training, validation and test (default: 969, 30, 1)")
    split_rule: str = flag(
        "mcore", "how shares become boundaries: megatron-core's rule or the legacy one", choices=("mcore", "legacy")
    )
    data_cache_path: str | None = flag(None, "folder for index caches (default: beside the data)")
    mock_data: bool = flag(False, "synthetic tokens instead of a data set")
    num_workers: int = flag(2, "0 reads each batch when it is needed; more reads ahead in a thread", least=0)
    dataloader_type: str = flag(
        "single",
        "order of samples: in one pass, or reshuffled each epoch by --seed and the epoch, the same on any number of "
        "processes",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = flag(
        False,
        "with --dataloader-type cyclic: Megatron's own order. Every data-parallel process reshuffles its own part, so "
        "the loss depends on the number of processes and on --micro-batch-size, and a resume needs the same of both "
        "(Megatron's --no-data-sharding is the default here)",
    )
    reset_position_ids: bool = flag(False, "positions start again after each end of document")
    reset_attention_mask: bool = flag(False, "attention does not cross an end of document")
    eod_mask_loss: bool = flag(False, "no loss where the input is an end of document")
    seed: int = flag(1234, "seed of the initial weights, the data order and dropout", least=0)
    override_data: bool = flag(
        False,
        "on resume, let this command line's data (corpora, weights, split, order, seed, sequence length) replace the "
        "checkpoint's, from the position reached",
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer made the data set (its vocabulary sizes the model)."""

    tokenizer_type: str | None = flag(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = flag(None, "SentencePiece .model, or a Hugging Face tokenizer.json")
    vocab_file: str | None = flag(None, "GPT-2 BPE's encoder.json")
    merge_file: str | None = flag(None, "GPT-2 BPE's vocab.bpe")
    vocab_size: int | None = flag(None, "number of token ids, where no tokenizer says it", least=1)

    @property
    def options(self) -> dict[str, Any]:
        """What a tokenizer is built from, beside its type."""
        names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")
        return {name: getattr(self, name) for name in names}
