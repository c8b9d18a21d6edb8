"""Gradients that the user replaces, or gives to parameters without one, beside plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from tests.unit.adapter.beside_torch import assert_close, batch

Edit = Callable[[nn.Module], None]


class Network(nn.Module):
    """Uses ``rare`` in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.usual, self.rare = nn.Linear(5, 5), nn.Linear(5, 5)
        self.double()

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        y: torch.Tensor = self.usual(x)
        return self.rare(y.tanh()) if uses_rare else y


def gives_other_memory(model: Any) -> None:
    model.usual.weight.grad.data = 3 * model.usual.weight.grad


def sets_other_memory(model: Any) -> None:
    model.usual.weight.grad.set_(torch.full_like(model.usual.weight, 0.1))


def decays_by_hand(model: Any) -> None:
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = grad + 0.1 * parameter.detach()


def gives_to_a_rare_one(model: Any) -> None:
    model.rare.bias.grad = torch.full_like(model.rare.bias, 0.1)


@pytest.mark.parametrize("edit", [gives_other_memory, sets_other_memory, decays_by_hand, gives_to_a_rare_one])
@pytest.mark.parametrize(("accumulates", "uses_rare"), [(1, 9), (2, 9), (2, 2), (1, 2)])
def test_gradients_of_the_user_count_as_in_torch(edit: Edit, accumulates: int, uses_rare: int) -> None:
    """Micro-batches whose number is divisible by ``uses_rare``, but for the first, use the rare layer."""
    model, other = Network(), Network()
    config = {"train_batch_size": 4 * accumulates, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    clients, optimizer = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (model, other))
    engine: Any = gptpar.initialize(model=model, config=config, optimizer=clients)[0]
    for place in range(5 * accumulates):
        used = place > 0 and place % uses_rare == 0
        engine.backward(engine(batch(place), used).square().mean())
        (other(batch(place), used).square().mean() / accumulates).backward()
        for (name, one), plain in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (plain.grad is None), name
            assert one.grad is None or torch.allclose(one.grad, plain.grad, rtol=0, atol=1e-13), name
        edit(model)
        edit(other)
        if engine.is_gradient_accumulation_boundary():
            for plain in other.parameters():  # an engine's parameter without a gradient has one of zero
                plain.grad = torch.zeros_like(plain) if plain.grad is None else plain.grad
            optimizer.step()
            optimizer.zero_grad()
        engine.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.close()
    assert_close(model.parameters(), other.parameters(), atol=1e-13)
