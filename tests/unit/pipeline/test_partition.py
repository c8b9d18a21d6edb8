"""Which layers go to which part: the balancer against all partitions, and every method's answer and errors."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
import torch

from gptpar.errors import ConfigError
from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline.layer_split import split_layers
from gptpar.pipeline.partition import balance, balanced, balanced_interleaved, partition, uniform

KINDS = ["Embedding", *["Block"] * 6, "Norm", "Head"]
PARAMETERS = [30, *[10] * 6, 1, 0]
FLOPS = [0.0, *[10.0] * 6, 0.0, 25.0]


def all_partitions(num_layers: int, num_parts: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, num_layers), num_parts - 1):
        yield [0, *cuts, num_layers]


def sums(weights: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise(bounds)]


def parts_of(method: str | Sequence[int], num_parts: int, num_stages: int | None = None) -> list[int]:
    return partition(method, num_parts, parameters=PARAMETERS, flops=FLOPS, kinds=KINDS, num_stages=num_stages)


def test_balanced_equals_the_best_of_all_partitions() -> None:
    """Heaviest part, then squared weights, then squared numbers of layers; of equals the later parts have more."""
    draw = random.Random(1234)
    for _ in range(200):
        weights = [draw.choice([0, 1, 1, draw.randint(0, 20)]) for _ in range(draw.randint(1, 10))]
        num_parts = draw.randint(1, len(weights))

        def cost(bounds: list[int], weights: list[int] = weights) -> tuple[object, ...]:
            heavy = sums(weights, bounds)
            layers = [b - a for a, b in pairwise(bounds)]
            return max(heavy), sum(x * x for x in heavy), sum(x * x for x in layers), bounds[::-1]

        assert balanced(weights, num_parts) == min(all_partitions(len(weights), num_parts), key=cost)


def test_balanced_settles_ties_evenly() -> None:
    assert balanced([1] * 24, 16) == [*range(9), *range(10, 25, 2)]
    assert balanced([0] * 8, 4) == [0, 2, 4, 6, 8]
    assert balanced([0, *[1] * 8, 0, 0], 4) == [0, 3, 5, 7, 11]
    assert balanced([5], 1) == [0, 1]


def test_interleaved_search_is_near_the_best() -> None:
    draw = random.Random(0)
    ratios = []
    for _ in range(60):
        num_stages, num_virtual_stages = draw.choice([(2, 2), (2, 3), (3, 2)])
        weights = [draw.choice([0, 1, 1, 1, draw.randint(1, 9)]) for _ in range(draw.randint(7, 12))]
        num_parts = num_stages * num_virtual_stages
        best = min(max(balance(weights, b, num_stages)) for b in all_partitions(len(weights), num_parts))
        ratios.append(max(balance(weights, balanced_interleaved(weights, num_parts, num_stages), num_stages)) / best)
    assert max(ratios) <= 1.25 and sum(ratio == 1 for ratio in ratios) >= 0.9 * len(ratios)


def test_methods() -> None:
    assert parts_of("parameters", 3) == [0, 1, 4, 9]
    assert parts_of("flops", 3) == [0, 4, 7, 9]
    assert parts_of("uniform", 4) == uniform(9, 4) == [0, 3, 5, 7, 9]
    assert parts_of("TYPE:block", 3) == parts_of("type:^BLOCK$", 3) == [0, 3, 5, 9]
    assert parts_of("0,4, 8,9", 3) == parts_of((0, 4, 8, 9), 3) == [0, 4, 8, 9]
    assert parts_of("flops", 4, num_stages=2) == balanced_interleaved(FLOPS, 4, 2)


@pytest.mark.parametrize(
    "method, num_parts, message",
    [
        ("parameters", 10, "9 layers cannot fill 10 pipeline parts"),
        ("flops", 0, "cannot be cut into 0 parts"),
        ("type:", 3, "method 'type:' is unknown"),
        ("uniform:2", 3, "method 'uniform:2' is unknown"),
        ("type:(", 3, r"type:\( is no regular expression"),
        ("0,4,9", 3, "3 parts need 4 partition boundaries, but 0,4,9 has 3"),
        ("0,4,8", 2, "0,4,8 must end at 9, the number of layers"),
        ("0,5,5,9", 3, "0,5,5,9 must increase"),
        ([], 2, "3 partition boundaries"),
    ],
)
def test_what_cannot_be_done_is_said(method: str | list[int], num_parts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(method, num_parts)


def test_layers_of_unknown_flops_cost_what_their_parameters_do() -> None:
    specs = [LayerSpec(torch.nn.Linear, n, 1) for n in (20, 1, 1, 7)]
    for method in ("flops", "parameters"):
        assert split_layers(specs, 2, 1, method, flops=[]).bounds == [0, 1, 4]
