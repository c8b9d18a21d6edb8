"""The CPU optimizer's two phases of updates of matrices: the same bits at every ratio, skipped steps, and errors."""

import math
from collections.abc import Callable

import pytest
import torch

from gptpar.offload import buckets
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.optim.muon import MUON, MuonHyperparameters
from gptpar.run.trainer import Trainer
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.host_optimizers import TWO_PIECES, make_host
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, config_words, hash_of, train

WORDS = "--optimizer muon --max-position-embeddings 24 --clip-grad 0.9"


def run_of(words: str, steps: int = 6) -> tuple[Trainer, list[list[float]]]:
    trainer = make_trainer(tiny_config(config_words(f"{WORDS} {words}")))
    seen = train(trainer, 0, steps)
    trainer.engine.finish()
    return trainer, seen


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("--bf16", 1 << 23),
        *(pytest.param(dtype, 333, marks=pytest.mark.slow) for dtype in ("--fp64", "--bf16 --cpu-parameters")),
    ],
)
def test_no_ratio_changes_a_bit(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps are clipped; buckets of AdamW speculate beside those of Muon."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", size)
    found = set()
    for ratio in RATIOS:
        trainer, seen = run_of(f"{dtype} {OFFLOAD} {ratio}" if ratio != "0" else dtype.replace("--cpu-parameters", ""))
        assert sum(norm > 0.9 for _, norm, _ in seen) > 0
        found.add(hash_of(trainer))
        trainer.close()
    assert len(found) == 1


@pytest.mark.parametrize("ratio", ["0.731", *(pytest.param(one, marks=pytest.mark.slow) for one in "01")])
def test_a_step_that_is_not_finite_changes_nothing(ratio: str) -> None:
    """Of fp16 gradients that overflow."""
    trainer, seen = run_of(f"--fp16 --initial-loss-scale 1024 {OFFLOAD} {ratio}", 3)
    assert not any(skipped for *_, skipped in seen)
    before = hash_of(trainer)
    trainer.loss_scale.load({**trainer.loss_scale.state(), "value": 2.0**40})
    ((_, norm, skipped),) = train(trainer, 3, 4)
    trainer.engine.finish()
    assert not math.isfinite(norm) and skipped
    assert hash_of(trainer) == before
    trainer.loss_scale.load({**trainer.loss_scale.state(), "value": 1024.0})
    assert not train(trainer, 4, 5)[0][2]
    trainer.engine.finish()
    assert hash_of(trainer) != before
    trainer.close()


RATES = (MuonHyperparameters(0.1, 0.0, 0.5),)


def make_muon(log: EventLog | None = None) -> tuple[HostOptimizer, dict[str, torch.Tensor]]:
    live = {piece.unit: torch.zeros(128) for piece in TWO_PIECES}
    return make_host(MUON.host_kernel(1), parameters=live, clip_grad=0.0, log=log), live


def part_of(memory: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: memory[start:stop]


def submit(host: HostOptimizer) -> None:
    for unit in ("second", "first"):
        host.submit_gradient(unit, torch.ones(128))


def test_the_loop_may_take_units_in_any_order() -> None:
    log = EventLog()
    host, live = make_muon(log)
    submit(host)
    host.step(torch.tensor(1.0), RATES, 1.0)
    for unit in ("second", "first"):
        memory = torch.zeros(128)
        host.expect_momenta(unit, part_of(memory))
        host.wait_for_momenta(unit)
        assert torch.equal(memory, torch.full((128,), 0.75))  # 0.5 g + 0.5 m, where m is 0.5 g
        host.submit_directions(unit, part_of(2 * memory))
    host.finish()
    for values in live.values():
        torch.testing.assert_close(values, torch.full((128,), -0.15))
    assert [event.unit for event in log.of(What.AVERAGED)] == ["second", "first"]
    assert host.steps_taken == 1 and host.updates() == (256, 0)
    host.close()


def test_a_skipped_step_waits_for_nobody() -> None:
    host, live = make_muon()
    submit(host)
    host.step(torch.tensor(float("nan")), RATES, 1.0)
    for unit in ("first", "second"):
        memory = torch.full((128,), 7.0)
        host.expect_momenta(unit, part_of(memory))
        host.wait_for_momenta(unit)
        host.submit_directions(unit, part_of(memory))
    host.finish()
    assert host.steps_taken == 0 and not any(values.any() for values in live.values())
    assert not any(values.any() for _, _, values in host.parts("exp_avg"))
    host.close()
