"""Saved inputs cut over the ranks that hold the same input."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gptpar.pipeline.host_activations import HostActivations
from gptpar.pipeline.recompute import Keep, _Kept, recomputed
from tests.spawn import spawn
from tests.unit.pipeline.recomputed import FromArray, gradients, layer


def twice(rank: int, size: int) -> None:
    """The backward pass may be run again over a kept graph, which gathers again."""
    x = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    y = recomputed(torch.exp, x * 1, keep=Keep(partition=(dist.group.WORLD, rank, size))).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None and float(x.grad.sum()) == pytest.approx(6 * np.exp(2.0), rel=1e-14)


def partitioned(rank: int, size: int, to_cpu: bool) -> tuple[list[bool], list[int], list[bool]]:
    """Whether the whole input is held without and with partitioning, what is held instead, which numbers agree."""
    twice(rank, size)
    keep = Keep(partition=(dist.group.WORLD, rank, size), host=HostActivations() if to_cpu else None)
    whole_is_held, outputs = [], []
    for how in (Keep(), keep):
        array = np.arange(35.0).reshape(7, 5)
        alive = weakref.ref(array)
        x = FromArray.apply(torch.ones(7, 5, dtype=torch.float64, requires_grad=True), array)
        outputs.append(recomputed(lambda x: (x * x).sin(), x, keep=how))
        del x, array
        whole_is_held.append(alive() is not None)
    kept = [o.data.shape.numel() for o in gc.get_objects() if type(o) is _Kept]
    del outputs
    model = layer()
    wanted, got = gradients(model, None), gradients(model, keep)
    return whole_is_held, kept, [torch.equal(a, b) for a, b in zip(wanted, got, strict=True)]


@pytest.mark.parametrize(("size", "to_cpu"), [(2, False), (3, True)])
def test_each_rank_keeps_its_share_and_the_numbers_stay_the_same(size: int, to_cpu: bool) -> None:
    for whole_is_held, kept, same in spawn(partitioned, size, size, to_cpu):
        assert whole_is_held == [True, False]
        assert kept == [-(-35 // size)]
        assert same == [True] * 6
