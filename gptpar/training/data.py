"""The run's tokenizer, data sets and loaders, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptpar.config import Config, DataConfig
from gptpar.config.derive import padded_vocab
from gptpar.data.blend import SampleSource
from gptpar.data.build import SampleSpec, build_train_valid_test
from gptpar.data.loader import BatchLoader
from gptpar.data.order import make_order
from gptpar.data.splits import DEFAULT_SPLIT
from gptpar.errors import DataError
from gptpar.tokenizer import Tokenizer, build_tokenizer
from gptpar.topology import Topology
from gptpar.training.batch_plan import BatchPlan

Loaders = dict[str, BatchLoader | None]


@dataclass(frozen=True)
class Vocabulary:
    """What training needs to know of the tokenizer.

    Attributes:
        size: number of token ids.
        eod: id of the end of a document, where a tokenizer says it.
        identity: kept in checkpoints.
    """

    size: int
    eod: int | None
    identity: dict[str, Any]


def tokenizer_of(config: Config) -> Tokenizer | None:
    """The configured tokenizer, or ``None`` when only ``--vocab-size`` is given."""
    t = config.tokenizer
    if t.tokenizer_type is None:
        return None
    return build_tokenizer(t.tokenizer_type, **t.options)


def vocabulary_of(config: Config) -> Vocabulary:
    """The size of the vocabulary, from the tokenizer or from ``--vocab-size``."""
    tokenizer = tokenizer_of(config)
    if tokenizer is not None:
        return Vocabulary(tokenizer.vocab_size, tokenizer.eod, tokenizer.identity())
    size = config.tokenizer.vocab_size
    assert size is not None
    return Vocabulary(size, None, {"type": "none", "vocab_size": size})


def with_vocabulary(config: Config, vocabulary: Vocabulary) -> Config:
    """The configuration with the padded vocabulary filled in."""
    padded = padded_vocab(vocabulary.size, config.model.make_vocab_size_divisible_by)
    return config.update("model", padded_vocab_size=padded)


def samples_wanted(config: Config, plan: BatchPlan) -> tuple[int, int, int]:
    """Samples asked of the training, validation and test data (Megatron's counts)."""
    iters, log = plan.num_iterations(), config.logging
    per_evaluation = log.eval_iters * plan.full
    if not per_evaluation:
        return plan.train_samples, 0, 0
    assert log.eval_interval
    return plan.train_samples, (iters // log.eval_interval + 1) * per_evaluation, per_evaluation


def make_loaders(config: Config, topology: Topology, plan: BatchPlan, vocabulary: Vocabulary) -> Loaders:
    """A loader for each of ``train``, ``valid`` and ``test``; ``None`` where there is nothing to read.

    Raises:
        DataError: what the data room finds wrong, or no training data.
    """
    data = config.data
    assert config.model.seq_length
    spec = SampleSpec(config.model.seq_length, data.seed, cache_dir=data.data_cache_path)
    sets = build_train_valid_test(
        samples_wanted(config, plan),
        spec,
        data_path=data.data_path,
        split_data_paths=(data.train_data_path, data.valid_data_path, data.test_data_path),
        split=data.split or DEFAULT_SPLIT,
        split_rule=data.split_rule,  # type: ignore[arg-type]
        mock_vocab_size=vocabulary.size if data.mock_data else None,
    )
    if sets[0] is None and not config.logging.skip_train:
        raise DataError(f"--split {data.split} leaves nothing to train on: give training a larger share.")
    return {
        name: None if found is None else _loader(config, topology, vocabulary, found, name)
        for name, found in zip(("train", "valid", "test"), sets, strict=True)
    }


def _loader(
    config: Config, topology: Topology, vocabulary: Vocabulary, samples: SampleSource, split: str
) -> BatchLoader:
    data: DataConfig = config.data
    assert config.batch.micro_batch_size
    # Evaluation always reads in order: its numbers are to be comparable from one time to the next.
    order = data.dataloader_type if split == "train" else "single"
    return BatchLoader(
        samples,
        order=make_order(order, len(samples)),  # type: ignore[arg-type]
        micro_batch_size=config.batch.micro_batch_size,
        dp_rank=topology.data_rank,
        dp_size=topology.layout.data,
        vocab_size=vocabulary.size,
        pin_memory=topology.device.type == "cuda",
        eod=vocabulary.eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        num_workers=data.num_workers,
    )
