"""Makes a run's tokenizer, data sets and loaders from its configuration, and counts the samples it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gptpar.config import Config, DataConfig, DataFlags, TokenizerConfig
from gptpar.config.sections.model import padded_vocab, softmax_vocab
from gptpar.data.blend import SampleSource
from gptpar.data.build import SampleSpec, build_train_valid_test
from gptpar.data.documents import Documents
from gptpar.data.loader import BatchLoader
from gptpar.data.order import RepeatingOrder, SampleOrder, WholeOrder, make_order
from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.errors import DataError
from gptpar.model.attention import document_kernel
from gptpar.model.dtypes import DTYPES
from gptpar.run.batch_plan import BatchPlan
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA

Loaders = dict[str, BatchLoader | None]


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as training needs it.

    Attributes:
        size: number of token ids.
        eod: id of the end of a document, where a tokenizer says it.
        identity: kept in checkpoints.
        files: name -> contents of the files that it is made from; each checkpoint gets a copy.
    """

    size: int
    eod: int | None
    identity: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


def tokenizer_of(config: TokenizerConfig) -> Tokenizer | None:
    """The configured tokenizer, or ``None`` when only ``--vocab-size`` is given."""
    if config.tokenizer_type is None:
        return None
    return build_tokenizer(config.tokenizer_type, **config.options)


def vocabulary_of(config: TokenizerConfig) -> Vocabulary:
    """The size of the vocabulary, from the tokenizer or from ``--vocab-size``."""
    tokenizer = tokenizer_of(config)
    if tokenizer is not None:
        return Vocabulary(tokenizer.vocab_size, tokenizer.eod, tokenizer.identity(), tokenizer.files)
    size = config.vocab_size
    assert size is not None
    return Vocabulary(size, None, {"type": "none", "vocab_size": size})


def with_vocabulary(config: Config, vocabulary: Vocabulary) -> Config:
    """The configuration with the padded vocabulary filled in; a model of ``--load-hf`` brings its own.

    Raises:
        DataError: the tokenizer has ids that such a model has no rows for.
    """
    if config.checkpoint.load_hf is not None:
        if vocabulary.size > (rows := config.model.padded_vocab_size):
            raise DataError(
                f"the tokenizer has {vocabulary.size:,} ids and the model in --load-hf {config.checkpoint.load_hf} "
                f"{rows:,} rows for them: give the model's own tokenizer"
            )
        return config
    wanted = config.model.pad_vocab_size_to
    if wanted is not None and vocabulary.size > wanted:
        raise DataError(
            f"the tokenizer has {vocabulary.size:,} ids and --pad-vocab-size-to {wanted} leaves no rows for "
            f"{vocabulary.size - wanted:,} of them: raise it"
        )
    rows = padded_vocab(vocabulary.size, config.model.make_vocab_size_divisible_by, wanted)
    ids = softmax_vocab(vocabulary.size, rows, over_padding=config.model.softmax_over_padding)
    return config.update("model", padded_vocab_size=rows, softmax_vocab_size=ids)


def samples_wanted(config: Config, plan: BatchPlan) -> tuple[int, int | None, int]:
    """Samples asked of the training, validation and test data (Megatron's counts); None: all there are, once."""
    iters, log = plan.num_iterations(), config.logging
    per_evaluation = log.eval_iters * plan.full
    if log.full_validation:
        return plan.train_samples, None, per_evaluation
    if not per_evaluation:
        return plan.train_samples, 0, 0
    return plan.train_samples, (iters // log.eval_interval + 1) * per_evaluation, per_evaluation


def make_loaders(
    config: Config, topology: Topology, plan: BatchPlan, vocabulary: Vocabulary, say: Callable[[str], None]
) -> Loaders:
    """A loader for each of ``train``, ``valid`` and ``test``; ``None`` where there is nothing to read.

    Args:
        say: called with a sentence where validation or test data are repeated.

    Raises:
        DataError: what the data room finds wrong, or training or validation data that are missing or too small.
    """
    data = config.data
    spec = SampleSpec(config.model.seq_length, data.seed, cache_dir=data.data_cache_path)
    wanted = samples_wanted(config, plan)
    train, valid, test = build_train_valid_test(
        wanted,
        spec,
        data_path=data.data_path,
        split_data_paths=(data.train_data_path, data.valid_data_path, data.test_data_path),
        split=data.split,
        split_rule=data.split_rule,  # type: ignore[arg-type]
        mock_vocab_size=vocabulary.size if data.mock_data else None,
    )
    loader = partial(_loader, config, topology, vocabulary)
    loaders: Loaders = {"train": None, "valid": None, "test": None}
    if train is not None:
        loaders["train"] = reader = loader(train, _training_order(config, topology, plan, len(train)))
        if reader.documents is not None:
            say(documents_line(config, topology.device.type, reader.documents))
    elif not config.logging.skip_train:
        raise DataError(f"--split {data.split} leaves nothing to train on: give training a larger share.")
    if valid is not None:
        whole = config.logging.full_validation
        loaders["valid"] = loader(
            valid, WholeOrder(len(valid)) if whole else _evaluation_order("validation", len(valid), wanted[1] or 0, say)
        )
    elif config.logging.full_validation:
        raise DataError(f"--split {data.split} leaves --full-validation nothing to read: give validation a share.")
    if test is not None:
        loaders["test"] = loader(test, _evaluation_order("test", len(test), wanted[2], say))
    return loaders


def documents_line(config: Config, device_type: str, documents: Documents) -> str:
    """The banner's line on documents: how they are kept apart, and their lengths as far as known."""
    kernel = document_kernel(config.model, device_type, DTYPES[config.precision.dtype])
    if not documents.room:
        where = "no document ends inside the samples that were looked at: attention sees whole samples"
        return f"documents: {where}; micro-batches with such an end take {kernel}"
    size = f"{documents.mean_length:,.0f} tokens each within their samples, room for {documents.room} in a micro-batch"
    return f"documents: attention inside them by {kernel}; {size}"


def _training_order(config: Config, topology: Topology, plan: BatchPlan, there: int) -> SampleOrder:
    """The order of the training samples, once it is known that they reach to the end of the run."""
    data, batch = config.data, config.batch
    order = make_order(data.dataloader_type, there, data.seed, data_sharding=data.data_sharding)  # type: ignore[arg-type]
    if config.logging.skip_train:
        return order
    if data.dataloader_type == "single" and there < plan.train_samples and there < (needed := _samples_needed(plan)):
        raise DataError(
            f"the run needs {needed:,} training samples, but its corpora without weights have {there:,} and are read "
            "once: give weights (WEIGHT PREFIX WEIGHT PREFIX ...), which repeat them, train on fewer samples, or add "
            "--dataloader-type cyclic."
        )
    order.indices(0, batch.micro_batch_size, topology.position(DATA), topology.mesh.data)  # refuses too few samples
    return order


def _samples_needed(plan: BatchPlan) -> int:
    """Samples of all global batches; a last one with too few samples left is not trained on."""
    read = plan.done.consumed_samples
    return plan.sizes.samples_after(plan.sizes.steps_within(plan.train_samples, read), read)


def _evaluation_order(split: str, there: int, wanted: int, say: Callable[[str], None]) -> SampleOrder:
    """The order of evaluation samples: that of the file, so that evaluations are comparable with each other."""
    if there >= wanted:
        return make_order("single", there)
    say(
        f" > the {split} data have {there:,} samples and all evaluations together read {wanted:,}: they are repeated "
        "in order from the start (weights, fewer --eval-iters or --full-validation avoid that)"
    )
    return RepeatingOrder(there)


def data_order(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """The facts, beside the samples, that determine the order of the training samples; checkpoints keep them."""
    data = config.data
    order: dict[str, Any] = {"dataloader_type": data.dataloader_type}
    if data.dataloader_type == "cyclic":
        order["data_sharding"] = data.data_sharding
    if data.data_sharding:
        order |= {"data_parallel_size": data_parallel_size, "micro_batch_size": config.batch.micro_batch_size}
    return order


def other_order(saved: dict[str, Any] | None, there: DataFlags, here: dict[str, Any]) -> list[str]:
    """Differences in the order of the training samples, except ``--dataloader-type``, which is compared elsewhere.

    Going on in another order would repeat some samples and leave out others.

    Args:
        saved: the checkpoint's; ``None``: it is of a time when cyclic meant sharded.
        there: the checkpoint's data section.
        here: this run's.
    """
    if saved is None:
        sharded = {"data_sharding": True} if there.dataloader_type == "cyclic" else {}
        saved = {"dataloader_type": there.dataloader_type} | sharded
    if saved.get("dataloader_type") != here["dataloader_type"]:
        return []
    return [
        f"{name.replace('_', ' ')} {saved[name]} there, {here.get(name)} here"
        for name in saved
        if saved[name] != here.get(name)
    ]


def _loader(
    config: Config, topology: Topology, vocabulary: Vocabulary, samples: SampleSource, order: SampleOrder
) -> BatchLoader:
    data: DataConfig = config.data
    return BatchLoader(
        samples,
        order=order,
        micro_batch_size=config.batch.micro_batch_size,
        dp_rank=topology.position(DATA),
        dp_size=topology.mesh.data,
        vocab_size=vocabulary.size,
        pin_memory=topology.device.type == "cuda",
        eod=vocabulary.eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        num_workers=data.num_workers,
    )
