"""The CPU optimizer's two phases of updates of matrices: the same bits at every ratio, skipped steps, and errors."""

import math

import pytest
import torch

from gptpar.offload import buckets
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.optim.muon import MUON, MuonHyperparameters
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.host_optimizers import TWO_PIECES, make_host, submit_ones
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, assert_same_state, config_words, hash_of, run_of, train

WORDS = "--optimizer muon --max-position-embeddings 24 --clip-grad 0.9"


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
    plain = run_of(f"{WORDS} {dtype.replace('--cpu-parameters', '')}", 6)
    assert any(norm > 0.9 for norm in plain.norms)
    for ratio in RATIOS[1:]:
        assert_same_state(run_of(f"{WORDS} {dtype} {OFFLOAD} {ratio}", 6), plain)


@pytest.mark.parametrize("ratio", ["0.731", pytest.param("0", marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_changes_nothing(ratio: str) -> None:
    """Of fp16 gradients that overflow."""
    trainer = make_trainer(tiny_config(config_words(f"{WORDS} --fp16 --initial-loss-scale 1024 {OFFLOAD} {ratio}")))
    found = []
    for first, last, scale in ((0, 3, 1024.0), (3, 4, 2.0**40), (4, 5, 1024.0)):
        trainer.loss_scale.load({**trainer.loss_scale.state(), "value": scale})
        for _, norm, skipped in train(trainer, first, last):
            assert math.isfinite(norm) == (scale == 1024.0) == (not skipped)
        trainer.engine.finish()
        found.append(hash_of(trainer))
    assert found[0] == found[1] != found[2]
    trainer.close()


RATES = (MuonHyperparameters(0.1, 0.0, 0.5),)


def make_muon(log: EventLog | None = None) -> tuple[HostOptimizer, dict[str, torch.Tensor]]:
    """An optimizer that has the gradients of a step."""
    live = {piece.unit: torch.zeros(128) for piece in TWO_PIECES}
    host = make_host(MUON.host_kernel(1), parameters=live, clip_grad=0.0, log=log)
    submit_ones(host, "second", "first")
    return host, live


def exchange(host: HostOptimizer, unit: str, momenta: torch.Tensor) -> None:
    """The loop fetches a unit's momenta, and sends twice of what it got as their directions."""
    host.expect_momenta(unit, lambda start, stop: momenta[start:stop])
    host.wait_for_momenta(unit)
    directions = 2 * momenta
    host.submit_directions(unit, lambda start, stop: directions[start:stop])


def test_the_loop_may_take_units_in_any_order() -> None:
    log = EventLog()
    host, live = make_muon(log)
    host.step(torch.tensor(1.0), RATES, 1.0)
    for unit in ("second", "first"):
        exchange(host, unit, momenta := torch.zeros(128))
        assert torch.equal(momenta, torch.full((128,), 0.75))  # 0.5 g + 0.5 m, where m is 0.5 g
    host.finish()
    for values in live.values():
        torch.testing.assert_close(values, torch.full((128,), -0.15))
    assert [event.unit for event in log.of(What.AVERAGED)] == ["second", "first"]
    assert host.steps_taken == 1 and host.updates() == (256, 0)
    host.close()


def test_a_skipped_step_waits_for_nobody() -> None:
    host, live = make_muon()
    host.step(torch.tensor(float("nan")), RATES, 1.0)
    for unit in ("first", "second"):
        exchange(host, unit, torch.full((128,), 7.0))
    host.finish()
    assert host.steps_taken == 0 and not any(values.any() for values in live.values())
    assert not any(values.any() for _, _, values in host.parts("exp_avg"))
    host.close()
