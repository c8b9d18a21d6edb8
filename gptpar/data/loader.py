"""Makes one rank's micro-batches (labels, masks, positions), which threads read in advance."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gptpar.data.blend import SampleSource
from gptpar.data.documents import NUM_SAMPLES, Documents, cumulative_lengths, document_starts, follow_ends
from gptpar.data.gpt_dataset import PAD
from gptpar.data.order import NO_SAMPLE, SampleOrder, micro_batch_starts
from gptpar.errors import DataError

NUM_START_UP_CHECKS = 8
"""Number of samples that are checked at the start."""
TOKENS_LOOKED_AT = 1 << 22
"""Number of tokens that are read at most to estimate the documents, if samples are long."""


@dataclass(frozen=True)
class MicroBatch:
    """B samples of S tokens. In the usual case an attribute is None, and nothing is copied or multiplied.

    Attributes:
        tokens_BS, labels_BS: int64; labels are the tokens that follow. Padding is 0 in both.
        loss_mask_BS: float32, 0 where a label does not count; None: all count.
        position_ids_BS: int64; None: 0 to S - 1.
        cu_seqlens: int32, the place of each document's first token among the B x S tokens, sample after sample. It is
            padded with B x S to a length that few micro-batches exceed; in those few, to a power of two plus one. Each
            sample starts a document. Tokens attend to their own document only; None: to their whole sample.
        counted: float64 scalar, if this is one of several parts of a micro-batch: the number of labels that count in
            all parts, divided by the number of parts. None: this is the whole, or all labels count.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor | None = None
    position_ids_BS: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    @property
    def num_counted(self) -> float:
        """Number of labels that count in the loss, or its mean over the parts."""
        if self.counted is not None:
            return self.counted.item()
        return self.labels_BS.numel() if self.loss_mask_BS is None else self.loss_mask_BS.sum().item()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> MicroBatch:
        return self._each(lambda tensor: tensor.clone())

    def pin_memory(self) -> MicroBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: convert(tensor) for name, tensor in tensors.items() if tensor is not None})


def make_micro_batch(
    samples_BT: np.ndarray,
    *,
    eod: int | None = None,
    room: int = 0,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatch:
    """Tokens, labels and masks of samples [B, S + 1], as Megatron's GPTDataset makes them.

    Padding never counts in the loss.

    Args:
        eod: id of the end-of-document token, needed by the three options.
        room: see :func:`~gptpar.data.documents.cumulative_lengths`.
        reset_position_ids: whether positions restart after each end of document.
        reset_attention_mask: whether tokens see their own document only.
        eod_mask_loss: whether the label after an end of document does not count in the loss; ends that follow each
            other, such as padding of packs, are then one document.
    """
    inputs, labels = samples_BT[:, :-1], samples_BT[:, 1:]
    counts = labels != PAD
    ends = inputs == eod
    if eod_mask_loss:
        counts = counts & ~ends
    positions = cu_seqlens = None
    if reset_position_ids:
        places = np.arange(inputs.shape[1])
        positions = places - np.maximum.accumulate(np.where(follow_ends(ends), places, 0), axis=1)
    if reset_attention_mask:
        cu_seqlens = cumulative_lengths(document_starts(ends, eod_mask_loss), room)
    return MicroBatch(
        torch.from_numpy(np.where(inputs == PAD, 0, inputs)),
        torch.from_numpy(np.where(labels == PAD, 0, labels)),
        None if counts.all() and not eod_mask_loss else torch.from_numpy(counts.astype(np.float32)),
        None if positions is None else torch.from_numpy(positions),
        None if cu_seqlens is None else torch.from_numpy(cu_seqlens),
    )


class BatchLoader:
    """Gives a rank its micro-batches of any global batch, and reads the next global batch in advance.

    Args:
        dataset: samples of S + 1 tokens.
        order: maps places in the run to samples.
        micro_batch_size: B.
        dp_rank, dp_size: this rank's position on the data axis, and that axis's size.
        vocab_size: ids from here on are an error; None: ids are not checked.
        pin_memory: whether micro-batches are in pinned memory.
        num_workers: threads that read in advance; 0 reads inside fetch.
        eod, rules: see make_micro_batch; the rules are reset_position_ids, reset_attention_mask and eod_mask_loss.

    Attributes:
        documents: the documents of a few samples, if tokens see their own document only.

    State: ``_ahead`` is the batch that is read in advance, (its start, its size) and a future for each micro-batch. All
    other fields stay as they are.

    Raises:
        DataError: an option needs eod, or one of a few samples that are checked first holds an id outside the
            vocabulary.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        order: SampleOrder,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        vocab_size: int | None = None,
        pin_memory: bool = False,
        num_workers: int = 1,
        eod: int | None = None,
        **rules: Any,
    ):
        if eod is None and any(rules.values()):
            raise DataError("resetting positions or attention, or masking the loss, at document ends needs the eod id")
        self._dataset, self._order, self._vocab_size = dataset, order, vocab_size
        self._micro_batch_size, self._dp_rank, self._dp_size = micro_batch_size, dp_rank, dp_size
        self._pin_memory = pin_memory
        self._pool = ThreadPoolExecutor(num_workers, "gptpar-data") if num_workers else None
        self._ahead: tuple[tuple[int, int], list[Future[MicroBatch]]] = ((-1, 0), [])
        has_documents, last = rules.get("reset_attention_mask", False), len(dataset) - 1
        count = NUM_START_UP_CHECKS
        if has_documents:
            count = min(NUM_SAMPLES, max(count, TOKENS_LOOKED_AT // len(dataset[0])))
        looked_at = self._read(np.unique(np.linspace(0, last, count).astype(np.int64)))
        how = eod, micro_batch_size, rules.get("eod_mask_loss", False)
        self.documents = Documents.of(looked_at, *how) if has_documents else None
        room = self.documents.room if self.documents else 0
        self._assemble: Callable[[np.ndarray], MicroBatch] = partial(make_micro_batch, eod=eod, room=room, **rules)
        self._padding = np.full_like(looked_at[0], PAD)

    def whole(self, global_batch_size: int) -> list[tuple[int, int]]:
        """(start, size) of the global batches that read the data set once, to its end.

        The last one is as small as the remaining samples allow; a WholeOrder fills it with padding.
        """
        step = self._micro_batch_size * self._dp_size
        total = -(-len(self._dataset) // step) * step
        return [(start, min(global_batch_size, total - start)) for start in range(0, total, global_batch_size)]

    def fetch(self, consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
        """This rank's micro-batches of the global batch that starts at ``consumed_samples``.

        The result depends on the arguments alone. Consecutive batches of one size are quick, because the following
        batch is read in advance.

        Raises:
            DataError: the batch cannot be cut evenly, the data set ends, or a token id is outside the
                vocabulary.
        """
        wanted = (consumed_samples, global_batch_size)
        starts = micro_batch_starts(*wanted, self._micro_batch_size, self._dp_size)
        if self._pool is None:
            return [self._make(start) for start in starts]
        guessed, futures = self._ahead
        if guessed != wanted:
            for future in futures:
                future.cancel()
            futures = [self._pool.submit(self._make, start) for start in starts]
        following = (consumed_samples + global_batch_size, global_batch_size)
        next_starts = micro_batch_starts(*following, self._micro_batch_size, self._dp_size)
        self._ahead = (following, [self._pool.submit(self._make, start) for start in next_starts])
        return [future.result() for future in futures]

    def whole_batch(self, consumed_samples: int, global_batch_size: int) -> tuple[np.ndarray, list[str]]:
        """(all ranks' samples of a global batch, [samples, S + 1] with PAD; a description of each)"""
        starts = micro_batch_starts(consumed_samples, global_batch_size, self._micro_batch_size, self._dp_size)
        size = self._micro_batch_size
        indices = np.concatenate(
            [self._order.indices(start, size, rank, self._dp_size) for start in starts for rank in range(self._dp_size)]
        )
        return self._read(indices), [self._dataset.describe(index) for index in indices.tolist()]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, start: int) -> MicroBatch:
        indices = self._order.indices(start, self._micro_batch_size, self._dp_rank, self._dp_size)
        batch = self._assemble(self._read(indices))
        return batch.pin_memory() if self._pin_memory else batch

    def _read(self, indices: np.ndarray) -> np.ndarray:
        dataset = self._dataset
        samples_BT = np.stack([self._padding if i == NO_SAMPLE else dataset[i] for i in indices.tolist()])
        limit = self._vocab_size
        if limit is not None and (samples_BT.max() >= limit or samples_BT.min() < PAD):
            row, place = np.argwhere((samples_BT >= limit) | (samples_BT < PAD))[0]
            raise DataError(
                f"{dataset.describe(int(indices[row]))} holds token id {samples_BT[row, place]} at place "
                f"{place}, outside the vocabulary of {limit:,}; the corpus was made with another tokenizer, or "
                "--vocab-size is wrong"
            )
        return samples_BT
