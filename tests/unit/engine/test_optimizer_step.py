"""A step of the engine: what is not finite changes nothing, and 16-bit weights are the rounded master weights."""

import math

import pytest
import torch

from gptpar.data.loader import MicroBatch
from tests.helpers import make_trainer, random_tokens, tiny_config


def step_once(trainer, poison: float = 0.0) -> list[float]:  # type: ignore[no-untyped-def]
    tokens = random_tokens(2, 16, 60)
    loss = trainer.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], 0)
    if poison:
        trainer.engine.optimizer.grad[5] = poison
    return trainer.update(loss, iteration=1, samples=2, progress=100, stop=False).readings.read()


@pytest.mark.parametrize(("flags", "poison"), [("", "inf"), ("", "nan"), ("--fp64", "inf"), ("--fp64", "nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(flags: str, poison: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    step_once(trainer)
    optimizer = trainer.engine.optimizer
    before = [b.clone() for b in list(optimizer.vectors.values())]
    _, norm, skipped, _ = step_once(trainer, float(poison))
    assert skipped == 1 and not math.isfinite(norm) and optimizer.steps_taken == 1
    for was, now in zip(before, list(optimizer.vectors.values()), strict=True):
        assert torch.equal(was, now)
    assert step_once(trainer)[2] == 0 and optimizer.steps_taken == 2


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_sixteen_bit_weights_are_the_rounded_masters(flags: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    norms = [step_once(trainer)[1] for _ in range(3)]
    assert trainer.engine.optimizer.master.dtype == torch.float32
    masters, live = trainer.engine.optimizer.state_tensors()["weights"], trainer.engine.parameters.views()
    assert masters.keys() == live.keys() and {view.dtype for view in live.values()} != {torch.float32}
    for name, held in masters.items():
        ((_, master),) = held.parts
        assert torch.equal(live[name], master.to(live[name].dtype)), name
    exact = make_trainer(tiny_config())
    assert norms == pytest.approx([step_once(exact)[1] for _ in range(3)], rel=0.05)


def test_a_loss_scale_beyond_fp16_is_no_overflow() -> None:
    """Only gradients have to fit fp16's range, which ends at 65,504."""
    exact = make_trainer(tiny_config())
    norms = [step_once(exact)[1] for _ in range(2)]
    trainer = make_trainer(tiny_config("--fp16 --loss-scale 65536"))
    found = [step_once(trainer)[1:3] for _ in range(2)]
    assert [norm for norm, _ in found] == pytest.approx(norms, rel=0.05) and not any(skipped for _, skipped in found)


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
