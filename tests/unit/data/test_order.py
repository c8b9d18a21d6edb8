"""Who reads which sample: the same global batch for every cut, and Megatron's cyclic buckets."""

import numpy as np
import pytest
import torch

from gptpar.data.order import NO_SAMPLE, RepeatingOrder, SampleOrder, WholeOrder, make_order, micro_batch_starts
from gptpar.errors import DataError

CUTS = [(1, 1), (1, 12), (2, 3), (3, 4), (4, 1), (6, 2)]  # (dp, micro-batch size) of a global batch of 12


def global_batch(order: SampleOrder, consumed: int, dp: int, mbs: int, size: int = 12) -> list[int]:
    """All samples of a global batch in the order of their places."""
    starts = micro_batch_starts(consumed, size, mbs, dp)
    return [i for start in starts for rank in range(dp) for i in order.indices(start, mbs, rank, dp).tolist()]


def test_single_takes_consecutive_samples() -> None:
    order = make_order("single", 100)
    assert list(micro_batch_starts(24, 12, 2, 3)) == [24, 30]
    assert order.indices(24, 2, 0, 3).tolist() == [24, 25]
    assert order.indices(30, 2, 2, 3).tolist() == [34, 35]
    for dp, mbs in CUTS:
        assert global_batch(order, 36, dp, mbs) == list(range(36, 48))
    assert make_order("single", 30).indices(24, 3, 1, 2).tolist() == [27, 28, 29]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(DataError, match="samples 26 to 31 are needed, but the data set has 30"):
        make_order("single", 30).indices(26, 3, 0, 2)  # on the rank whose own samples exist, too
    with pytest.raises(DataError, match="global batch of 10 .* micro-batches of 2 on 3 .* multiple of 6"):
        micro_batch_starts(0, 10, 2, 3)
    with pytest.raises(DataError, match="takes 12 samples, the data set has 11"):
        make_order("cyclic", 11, data_sharding=True).indices(0, 4, 0, 3)
    with pytest.raises(DataError, match="7 of the 48 samples of epoch 1 is no multiple of 6"):
        make_order("cyclic", 50, data_sharding=True).indices(55, 2, 0, 3)


def megatron_sampler(total: int, consumed: int, mbs: int, rank: int, dp: int) -> list[list[int]]:
    """The rest of an epoch as Megatron's sharded random sampler hands it out."""
    step = mbs * dp
    active = total - total % step
    epoch, place = divmod(consumed, active)
    bucket = total // step * mbs
    generator = torch.Generator()
    generator.manual_seed(epoch)
    chosen = [rank * bucket + x for x in torch.randperm(bucket, generator=generator).tolist()][place // dp :]
    return [chosen[i : i + mbs] for i in range(0, len(chosen), mbs)]


@pytest.mark.parametrize("cut", CUTS[1::2])
@pytest.mark.parametrize("epoch", [0, 2])
def test_sharded_cyclic_is_megatrons(cut: tuple[int, int], epoch: int) -> None:
    dp, mbs = cut
    total, step = 101, dp * mbs
    active = total - total % step
    for place in (0, step, 3 * step):
        consumed = epoch * active + place
        for rank in range(dp):
            expected = megatron_sampler(total, consumed, mbs, rank, dp)
            order = make_order("cyclic", total, data_sharding=True)
            found = [order.indices(consumed + j * step, mbs, rank, dp).tolist() for j in range(len(expected))]
            assert found == expected


def test_cyclic_is_the_same_for_every_cut_and_loses_nothing() -> None:
    batches = {}
    for dp, mbs in CUTS:
        order = make_order("cyclic", 31, 5)
        batches[dp, mbs] = [global_batch(order, consumed, dp, mbs) for consumed in range(0, 96, 12)]
    stream = [i for batch in batches[1, 1] for i in batch]
    assert all(found == batches[1, 1] for found in batches.values())
    for epoch in range(3):  # 31 is no multiple of 12: epochs meet inside a batch
        assert stream[31 * epoch : 31 * (epoch + 1)] == np.random.RandomState([5, epoch]).permutation(31).tolist()


def test_evaluation_repeats_in_order_or_reads_all_once() -> None:
    repeating, whole = RepeatingOrder(10), WholeOrder(10)
    for dp, mbs in CUTS:
        assert global_batch(repeating, 12, dp, mbs) == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
        assert global_batch(whole, 0, dp, mbs) == [*range(10), NO_SAMPLE, NO_SAMPLE]
