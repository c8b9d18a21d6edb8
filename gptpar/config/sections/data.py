"""Flags of the data (paths, splits, loaders, seed, masks of documents) and the tokenizer; whether files are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from gptpar.config.fields import Missing, Notes, Open, flag
from gptpar.system.data_flags import TIKTOKEN, TOKENIZER_FILES, TOKENIZER_TYPES, split_weights

if TYPE_CHECKING:
    from gptpar.config import Flags


SPLIT = "969, 30, 1"
"""Megatron's default shares of training, validation and test."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Generic[Open]):
    """Where the samples come from, and in which order."""

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
    split: str | Open = flag(None, f"shares of training, validation and test (default: {SPLIT})", complete=SPLIT)


@dataclass(frozen=True, kw_only=True)
class DataFlags(DataConfig[None]):
    """Data sets in Megatron's .bin/.idx format, or synthetic tokens."""

    data_args_path: str | None = flag(None, "file with the words of --data-path", metavar="FILE")
    per_split_data_args_path: str | None = flag(
        None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path: lists or texts under "
        "train, valid and test",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data set (its vocabulary sizes the model)."""

    tokenizer_type: str | None = flag(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = flag(
        None,
        TOKENIZER_FILES["tokenizer_model"],
        names=("--tokenizer-name-or-path", "--tokenizer-path", "--tokenizer-file"),
    )
    vocab_file: str | None = flag(None, TOKENIZER_FILES["vocab_file"])
    merge_file: str | None = flag(None, TOKENIZER_FILES["merge_file"])
    vocab_size: int | None = flag(None, "number of token ids, where no tokenizer says it", least=1)
    tiktoken_pattern: str | None = flag(None, TIKTOKEN["tiktoken_pattern"], choices=("v1", "v2"))
    tiktoken_num_special_tokens: int | None = flag(None, TIKTOKEN["tiktoken_num_special_tokens"], least=1)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a tokenizer, beside its type."""
        names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")
        of_tiktoken = ("tiktoken_pattern", "tiktoken_num_special_tokens")
        return {name: getattr(self, name) for name in (*names, *of_tiktoken)}


SEED_LIMIT = 2**32  # numpy's RandomState, whose shuffles are Megatron's, takes no larger one


def check_data(flags: Flags) -> Iterator[str]:
    """Check the sources of tokens."""
    d, t = flags.data, flags.tokenizer
    yield from _sources(d)
    if _has_parts(d) and d.split is not None:
        yield "--split cuts one --data-path into three; with --train-data-path it has no meaning: drop it."
    if d.data_sharding and d.dataloader_type != "cyclic":
        yield "--data-sharding is Megatron's order for --dataloader-type cyclic: add that, or drop --data-sharding."
    if d.seed >= SEED_LIMIT:
        yield f"--seed is {d.seed}; the data order takes seeds below 2^32 = {SEED_LIMIT}."
    if flags.logging.full_validation:
        yield from _full_validation(d)
    yield from _tasks(flags)
    if t.tokenizer_type is None and t.vocab_size is None:
        yield Missing("the vocabulary is not known: give --tokenizer-type and its files, or --vocab-size.")
    if (d.eod_mask_loss or d.reset_position_ids or d.reset_attention_mask) and t.tokenizer_type is None:
        yield "--eod-mask-loss and --reset-* need to know the end-of-document id: give --tokenizer-type."


def _sources(d: DataFlags) -> Iterator[str]:
    """Exactly one source of data."""
    sources = {"--mock-data": d.mock_data, "--data-path": bool(d.data_path), "--train-data-path": _has_parts(d)}
    given = [name for name, present in sources.items() if present]
    if not given:
        yield Missing("there is nothing to train on: give --data-path PREFIX (see gptpar preprocess), or --mock-data.")
    elif len(given) > 1:
        yield f"data is given twice ({' and '.join(given)}): keep one."


def _has_parts(d: DataFlags) -> bool:
    """Whether training, validation and test have paths of their own."""
    return any((d.train_data_path, d.valid_data_path, d.test_data_path))


def _full_validation(d: DataFlags) -> Iterator[str]:
    path = d.data_path or d.valid_data_path
    if d.mock_data:
        yield "--full-validation reads a validation set to its end, which --mock-data lack: give a corpus, or drop it."
    elif path is None and d.train_data_path:
        yield "--full-validation has no validation set to read: give --valid-data-path."
    elif path is not None and 1 < (count := len(split_weights(path)[0])) < len(path):
        name = "--data-path" if d.data_path else "--valid-data-path"
        yield (
            f"--full-validation reads each sample of {count} corpora once, but the weights of {name} "
            "repeat or leave out some: give validation's corpora without weights, with --train-data-path and "
            "--valid-data-path."
        )


def _tasks(flags: Flags) -> Iterator[str]:
    log = flags.logging
    if log.eval_tasks and flags.tokenizer.tokenizer_type is None:
        yield Missing("--eval-tasks reads text: give --tokenizer-type and its files.")
    unused = {"--eval-limit": log.eval_limit, "--eval-tasks-interval": log.eval_tasks_interval}
    if not log.eval_tasks and (given := [name for name, value in unused.items() if value is not None]):
        yield f"{' and '.join(given)} without --eval-tasks has no effect: give its files, or leave it out."


def check_files(flags: Flags) -> Iterator[str]:
    """Whether the files that must be there are there."""
    yield from _corpora(flags.data)
    csv_dir = flags.logging.csv_dir
    if csv_dir and Path(csv_dir).exists() and not Path(csv_dir).is_dir():
        yield f"--csv-dir {csv_dir} is a file; a folder is needed."
    switch = flags.batch.kill_switch_path
    if switch is not None and Path(switch).exists():
        yield f"--kill-switch-path {switch} is there already, so the run would stop at once: remove it."


def _corpora(d: DataFlags) -> Iterator[str]:
    for paths in filter(None, (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)):
        for prefix in split_weights(paths)[0]:
            missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
            if missing:
                remedy = "give the path without .bin or .idx"
                if not prefix.endswith((".bin", ".idx")):
                    remedy = "gptpar preprocess makes them from text"
                yield f"the data set {prefix} is not complete: {' and '.join(missing)} not found; {remedy}."


def derive_data(notes: Notes) -> None:
    """Derive the tokenizer's kind by Megatron's default, its file by GPT-NeoX's way to name it, and the split."""
    t = notes.flags.tokenizer
    if t.tokenizer_type is None and t.vocab_file and t.merge_file:
        notes.fill("tokenizer", "tokenizer_type", "GPT2BPETokenizer", "--vocab-file and --merge-file, as in Megatron")
    if t.tokenizer_type in ("HFTokenizer", "PretrainedFromHF") and t.vocab_file:
        notes.fill("tokenizer", "tokenizer_model", t.vocab_file, "--vocab-file, as in GPT-NeoX")
    if notes.flags.data.data_path:
        notes.fill("data", "split", SPLIT, "Megatron's default")
