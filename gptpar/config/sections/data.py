"""Flags of the data: paths, splits, loaders, seed, masks of documents."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the data that are complete as they are typed."""

    data_path: tuple[str, ...] | None = flag(
        None, "prefixes of .bin/.idx pairs, or WEIGHT PREFIX pairs to blend", metavar="PREFIX"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for training alone", metavar="PREFIX")
    valid_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for validation alone", metavar="PREFIX")
    test_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for testing alone", metavar="PREFIX")
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
    reset_attention_mask: bool = flag(
        False,
        "attention does not cross an end of document",
        names=("--use-packed-seq-params", "--dataloader-inter-document-masking"),
    )
    eod_mask_loss: bool = flag(False, "no loss where the input is an end of document")
    calculate_per_token_loss: bool = flag(
        False,
        "the loss of a step is the mean over all its tokens that count, not the mean of its micro-batches' means; with "
        "--eod-mask-loss, these have different numbers of tokens",
    )
    seed: int = flag(1234, "seed of the initial weights, the data order and dropout", least=0)
    override_data: bool = flag(
        False,
        "on resume, let this command line's data (corpora, weights, split, order, seed, sequence length) replace the "
        "checkpoint's, from the position reached",
    )


@dataclass(frozen=True, kw_only=True)
class DataFlags(DataOptions):
    """Data sets in Megatron's .bin/.idx format, or synthetic tokens."""

    split: str | None = flag(None, "shares of training, validation and test (default: 969, 30, 1)")
    data_args_path: str | None = flag(None, "file with the words of --data-path", metavar="FILE")
    per_split_data_args_path: str | None = flag(
        None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path: lists or texts under "
        "train, valid and test",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """Where the samples come from, and in which order."""

    split: str = "969, 30, 1"
    """Shares of training, validation and test; Megatron's default."""
