"""A step of the engine: what is not finite changes nothing, and 16-bit weights are the rounded master weights."""

import math

import pytest
import torch

from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.optim.adamw import ADAMW
from gptpar.run.trainer import Trainer
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.unit.engine.small_units import infos
from tests.unit.engine.tiny_steps import forward_backward, update


def step_once(trainer: Trainer, poison: float = 0.0) -> list[float]:
    """Loss, norm, and whether the step is skipped, always with the same tokens."""
    loss = forward_backward(trainer, 0, 1)
    if poison:
        trainer.engine.optimizer.grad[5] = poison
    return update(trainer, loss, 0, 1)[:3]


@pytest.mark.parametrize(("flags", "poison"), [("", math.inf), ("--fp64", math.nan)])
def test_a_gradient_that_is_not_finite_changes_nothing(flags: str, poison: float) -> None:
    trainer = make_trainer(tiny_config(flags))
    step_once(trainer)
    optimizer = trainer.engine.optimizer
    before = [vector.clone() for vector in optimizer.vectors.values()]
    _, norm, skipped = step_once(trainer, poison)
    assert skipped == 1 and not math.isfinite(norm) and optimizer.steps_taken == 1
    assert all(torch.equal(was, now) for was, now in zip(before, optimizer.vectors.values(), strict=True))
    assert step_once(trainer)[2] == 0 and optimizer.steps_taken == 2


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024", "--fp16 --loss-scale 65536"])
def test_sixteen_bit_weights_are_the_rounded_masters(flags: str) -> None:
    """A loss scale beyond fp16's range, which ends at 65,504, is no overflow: only gradients have to fit."""
    exact, trainer = make_trainer(tiny_config()), make_trainer(tiny_config(flags))
    found = [step_once(trainer)[1:] for _ in range(3)]
    assert [norm for norm, _ in found] == pytest.approx([step_once(exact)[1] for _ in range(3)], rel=0.05)
    assert not any(skipped for _, skipped in found)
    assert trainer.engine.optimizer.master.dtype == torch.float32
    masters, live = trainer.engine.optimizer.state_tensors()["weights"], trainer.engine.parameters.views()
    assert masters.keys() == live.keys() and {view.dtype for view in live.values()} != {torch.float32}
    for name, held in masters.items():
        ((_, master),) = held.parts
        assert torch.equal(live[name], master.to(live[name].dtype)), name


def test_only_sums_are_kept_in_fp32() -> None:
    """A gradient that comes once stays as it came; over micro-batches, processes or a growing batch it is a sum."""
    for flags, dtype in (
        ("--bf16", torch.bfloat16),
        ("--fp16", torch.float16),
        ("", torch.float32),
        ("--fp64", torch.float64),
        ("--bf16 --global-batch-size 4", torch.float32),
    ):
        optimizer = make_trainer(tiny_config(flags)).engine.optimizer
        assert optimizer.grad.dtype == dtype, flags
        wide = optimizer.master.element_size()
        assert optimizer.bytes_of(0) == 3 * wide + dtype.itemsize
    growing = tiny_config().update("batch", rampup_batch_size=[2, 2, 4])
    runs = ((growing, 1), (tiny_config(), 2), (tiny_config(), 1))
    assert [config.batch.adds_gradients(size) for config, size in runs] == [1, 1, 0]
    trainer = make_trainer(tiny_config("--bf16"))
    with pytest.raises(AssertionError):
        trainer.engine.begin_gradients(2)


def test_what_both_tensor_ranks_hold_counts_on_the_first_one() -> None:
    """In numbers of zeros and norms of weights; the padding behind a parameter is zero, too, and counts nowhere."""
    zeros, squares = [], []
    for rank in range(2):
        table = ParameterTable.of({"layer": infos({"norm.weight": (5,)})}, Place(Mesh(tensor=2), rank))
        optimizer = MasterOptimizer([ADAMW] * 4, table, torch.zeros(table.length()), 0.0)
        optimizer.parts("weights")["norm.weight"].fill(torch.ones(5))
        zeros.append(optimizer.zeros_in_grad())
        squares.append(optimizer.square_of_weights().item())
    assert zeros == [5, 0] and squares == [pytest.approx(5.0, rel=1e-6), 0.0]
