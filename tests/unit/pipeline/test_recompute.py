"""Recomputed layers: the same numbers, and only their inputs are held."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from gptpar.config import RecomputeConfig
from gptpar.pipeline.host_activations import HostActivations
from gptpar.pipeline.recompute import Keep, recompute_groups, recomputed
from tests.unit.pipeline.recomputed import FromArray, gradients, layer

NAMES = [f"layers.{i}" for i in range(4, 11)]


@pytest.mark.parametrize("keep", [Keep(), Keep(host=HostActivations())])
def test_dropout_is_drawn_again_as_it_was(keep: Keep) -> None:
    model = layer()
    wanted, got = gradients(model, None), gradients(model, keep)
    assert [torch.equal(a, b) for a, b in zip(wanted, got, strict=True)] == [True] * 6
    assert not torch.equal(wanted[0], gradients(layer(0.0), None)[0])


def saved_bytes(keep: Keep | None) -> int:
    """Bytes that a forward pass saves for the backward pass, beside the parameters."""
    model = layer()
    own = {p.data_ptr() for p in model.parameters()}
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            seen.append(tensor.nbytes)
        return tensor

    x = torch.ones(5, 8, dtype=torch.float64, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model(x) if keep is None else recomputed(model, x, keep=keep)
    return sum(seen)


def test_only_the_input_is_saved() -> None:
    assert saved_bytes(Keep()) == 5 * 8 * 8
    assert saved_bytes(None) > 3 * 5 * 32 * 8


def test_the_input_is_held_until_the_backward_pass_and_no_longer() -> None:
    array = np.ones((5, 8))
    alive = weakref.ref(array)
    x = FromArray.apply(torch.ones(5, 8, dtype=torch.float64, requires_grad=True), array)
    y = recomputed(layer(), x, keep=Keep())
    del x, array
    assert alive() is not None
    y.sum().backward()
    del y
    assert alive() is None


def test_further_arguments_are_passed_as_they_are() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([2, 0, 1])
    keep = Keep(host=HostActivations())
    y = recomputed(lambda a, i, nothing: a[i] * a if nothing is None else a, x, ids, None, keep=keep)
    y.backward(torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))
    assert x.grad is not None and x.grad.tolist() == [11.0, 110.0, 101.0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [(name,) for name in NAMES]),
        ({"recompute_num_layers": 2}, [("layers.4",), ("layers.5",)]),
        ({"recompute_num_layers": 99, "recompute_method": "block"}, [(name,) for name in NAMES]),
        ({"recompute_method": "uniform"}, [(name,) for name in NAMES]),
        ({"recompute_num_layers": 3, "recompute_method": "uniform"}, [tuple(NAMES[i : i + 3]) for i in (0, 3, 6)]),
    ],
)
def test_which_blocks_are_recomputed_together(how: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    config = RecomputeConfig(recompute_granularity="full", **how)
    assert recompute_groups(config, NAMES) == expected
    assert recompute_groups(config, []) == recompute_groups(RecomputeConfig(), NAMES) == []
