"""Norms of gradients of any length, and zeros among them."""

import pytest
import torch

from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.optim.adamw import ADAMW
from gptpar.optim.grad_norm import GradientNorm, square_of
from tests.unit.engine.small_units import SHAPES, infos, table_of


def make_optimizer(unit: Unit, grad: torch.Tensor, shard: int = 0, tensor_rank: int = 0) -> MasterOptimizer:
    return MasterOptimizer([ADAMW] * 4, table_of(unit, shard, tensor_rank), grad, clip_grad=1.0)


def square_of_grad(table: ParameterTable, grad: torch.Tensor) -> torch.Tensor:
    (unit,) = table.units
    norm = GradientNorm({unit.name: table.counted(unit.name)})
    return norm.square(norm.measured({unit.name: grad}), grad.device)


def test_norm_of_a_long_buffer_is_exact() -> None:
    """Summed in one go, fp32 is 3 % off here."""
    shapes = {"a.weight": (25_000_000,), "b.weight": (5000, 5000)}
    unit = Unit.of("long", infos(shapes), 1)
    grad = torch.zeros(unit.length)
    for view in unit.views(grad).values():
        view.fill_(0.1)
    square = square_of_grad(table_of(unit), grad)
    assert square.dtype == torch.float64
    assert square.sqrt().item() == pytest.approx(0.1 * 50e6**0.5, rel=1e-6)


def test_only_zeros_of_parameters_are_counted() -> None:
    """The gaps between parameters are zeros too; of two shards each counts its own."""
    unit = Unit.of("layer", infos(SHAPES), 2)
    whole = torch.zeros(unit.length)
    for view in unit.views(whole).values():
        view.fill_(1.0)
    unit.views(whole)["last.matrix"][3:5] = 0
    unit.views(whole)["last.weight"][7] = 0
    counts = [make_optimizer(unit, grad, k).zeros_in_grad() for k, grad in enumerate(whole.chunk(2))]
    assert counts == [20, 1]
    grad = whole.chunk(2)[0]
    assert make_optimizer(unit, grad, tensor_rank=1).zeros_in_grad() == 0
    assert square_of_grad(table_of(unit, tensor_rank=1), grad).item() == 0


def test_a_norm_of_any_length_is_exact() -> None:
    grad = torch.linspace(-1, 1, 1000)
    pieces = [grad[:1], grad[1:130], grad[130:130], grad[130:]]
    assert square_of(pieces, grad.device).item() == pytest.approx(float(grad.double().square().sum()), rel=1e-6)
    narrow = [piece.bfloat16() for piece in pieces]
    exact = float(torch.cat(narrow).double().square().sum())
    assert square_of(narrow, grad.device).item() == pytest.approx(exact, rel=1e-6)  # not rounded to 8 bits
