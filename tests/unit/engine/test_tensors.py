"""Nests of tensors, as users' batches are."""

from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch

from gptpar.engine.tensors import mapped, outline


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    length: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", torch.tensor(len(self.tokens)))


@pytest.mark.parametrize("nest", [Batch, lambda x: MappingProxyType({"tokens": x}), lambda x: {"tokens": (x,)}])
def test_all_tensors_of_a_batch_are_changed_in_a_copy(nest) -> None:  # type: ignore[no-untyped-def]
    batch = nest(torch.ones(3))
    changed = mapped(batch, lambda x: x + 1)
    found = changed.tokens if isinstance(changed, Batch) else changed["tokens"]
    assert torch.equal(found[0] if isinstance(found, tuple) else found, torch.full((3,), 2.0))
    if isinstance(changed, Batch):
        assert changed.length == 4 and torch.equal(batch.tokens, torch.ones(3)) and batch.length == 3


@dataclass
class Masked:
    tokens: torch.Tensor
    unset: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.tokens != 0


def test_what_is_not_replaced_makes_an_outline_of_its_own() -> None:
    """A recorded step would go on with the first micro-batch's mask, or with a set's tensor."""
    x = torch.ones(3)
    assert mapped(Masked(x), lambda y: y + 1).tokens.sum() == 6
    for make in (lambda: Masked(x), lambda: {x}, lambda: frozenset({x})):
        assert outline(make()) != outline(make())
    for make in (lambda: Batch(x), lambda: {"a", 1}, lambda: [x, {"b": (x, 2)}]):
        assert outline(make()) == outline(make())
    assert outline({1, 2}) != outline({1, 3})
