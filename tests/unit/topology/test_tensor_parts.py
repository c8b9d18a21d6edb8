import random
from math import prod

import pytest
import torch

from gptpar.topology import initial_values
from gptpar.topology.initial_values import Constant, Normal, draw, drawn_rows, initialise, seed_of
from gptpar.topology.tensor_parts import as_parts, whole
from tests.flat_parts import parts_of_flat


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_a_range_of_a_flat_buffer_is_the_same_elements_of_the_global_tensor(num_dims: int) -> None:
    rng = random.Random(num_dims)
    for _ in range(200):
        shape = [rng.randint(1, 6) for _ in range(num_dims)]
        full = torch.arange(prod(shape))
        local_shape = [rng.randint(1, n) for n in shape]
        offsets = [rng.randint(0, n - m) for n, m in zip(shape, local_shape, strict=True)]
        here = tuple(slice(o, o + m) for o, m in zip(offsets, local_shape, strict=True))
        start, stop = sorted(rng.randint(0, prod(local_shape)) for _ in range(2))
        local = full.view(shape)[here].flatten()  # brute force: the elements of the range, one by one

        buffer = torch.full((prod(local_shape) + 2,), -1)
        flat = buffer[1 + start : 1 + stop]
        parts = parts_of_flat(shape, local_shape, offsets, start, stop, flat)
        assert parts.shape == torch.Size(shape) and parts.dtype == torch.int64
        assert parts.num_held == stop - start
        parts.fill(full.view(shape))
        assert flat.tolist() == local[start:stop].tolist()
        assert (buffer != -1).sum() == stop - start  # nothing beside the range was written


def test_fill_casts_and_leaves_no_gradient_behind() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    whole(weight).fill(torch.arange(6.0).view(2, 3))
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]] and weight.requires_grad and weight.grad_fn is None
    scalar = torch.zeros(())
    as_parts(scalar).fill(torch.tensor(2.5))
    assert scalar.item() == 2.5
    held = whole(weight)
    assert as_parts(held) is held


def test_parts_are_initialised_as_the_whole_would_be() -> None:
    full = draw(Normal(0.5), torch.Size([5, 4]), 3, "w")
    flat, plain = torch.zeros(7, dtype=torch.float64), torch.zeros(5, 4)
    initialise({"w": parts_of_flat([5, 4], [5, 2], [0, 2], 2, 9, flat)}, {"w": Normal(0.5)}, 3)
    initialise({"w": plain}, {"w": Normal(0.5)}, 3)
    assert torch.equal(plain, full)
    assert flat.tolist() == full[:, 2:].flatten()[2:9].tolist()


@pytest.mark.parametrize("shape", [(), (7,), (100,), (33, 48), (4, 2, 8, 16), (10, 15), (0, 16)])
@pytest.mark.parametrize("piece", [16, 1000])
def test_values_that_are_drawn_in_pieces_are_those_of_one_call(
    shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_values, "PIECE", piece)
    found, generator = torch.zeros(shape), torch.Generator().manual_seed(seed_of(3, "w"))
    initialise({"w": found}, {"w": Normal(0.5)}, 3)
    assert torch.equal(found, torch.empty(shape).normal_(std=0.5, generator=generator))
    if shape == (33, 48):
        assert max(len(rows) for _, rows in drawn_rows(Normal(0.5), torch.Size(shape), 3, "w")) == max(1, piece // 48)


def test_what_is_not_held_is_not_drawn() -> None:
    nothing = parts_of_flat([1 << 20, 1 << 20], [1, 1], [0, 0], 0, 0, torch.zeros(0))  # 4 TiB if it were drawn
    one = torch.zeros(1)
    initialise({"huge": nothing, "one": one}, {"huge": Normal(1.0), "one": Constant(2.0)}, 3)
    assert nothing.parts == () and nothing.num_held == 0 and one.item() == 2.0
