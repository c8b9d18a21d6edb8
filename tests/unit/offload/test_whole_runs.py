"""Whole runs with an offloaded partition: overflows, speculation, memory that does not suffice, and saves."""

from __future__ import annotations

import math

import pytest
import torch

from gptpar.engine.ranges import Home
from gptpar.errors import GptparError
from gptpar.offload import build, machine
from gptpar.offload.buckets import StateSize
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.optim.adamw import ADAMW
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, batches, config_words, hash_of, train

STEPS = 12


def test_fp16_overflows_are_skipped_on_both_sides() -> None:
    words = config_words("--fp16 --initial-loss-scale 1e7 --hysteresis 1")
    plain = make_trainer(tiny_config(words))
    wanted = train(plain, 0, STEPS)
    assert any(skipped for *_, skipped in wanted) and not all(skipped for *_, skipped in wanted)
    for speculation in ("on", "off"):
        shared = make_trainer(tiny_config(f"{words} {OFFLOAD} 0.7 --offload-speculation {speculation}"))
        found = train(shared, 0, STEPS)
        assert [skipped for *_, skipped in found] == [skipped for *_, skipped in wanted]
        assert shared.engine.optimizer.steps_taken == plain.engine.optimizer.steps_taken
        assert shared.host is not None and shared.host.steps_taken == plain.engine.optimizer.steps_taken
        assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in wanted], rel=2e-3)
        shared.close()


def test_speculation_changes_no_bit() -> None:
    """Clipping in some steps makes it redo; the results are those of waiting, bit for bit."""
    states, redone = [], []
    for speculation in ("off", "on"):
        words = config_words(f"--bf16 --clip-grad 0.9 {OFFLOAD} 1 --offload-speculation {speculation}")
        trainer = make_trainer(tiny_config(words))
        losses = train(trainer, 0, 20)
        assert trainer.host is not None
        redone.append(trainer.host.num_redone)
        states.append((losses, hash_of(trainer)))
        trainer.close()
    assert redone[0] == 0 and 0 < redone[1] < 20
    assert states[0] == states[1]


def test_zeros_and_norms_count_both_shares() -> None:
    words = config_words("--log-num-zeros-in-grad --fp64 --max-position-embeddings 24")  # 8 rows get no gradient
    plain, shared = make_trainer(tiny_config(words)), make_trainer(tiny_config(f"{words} {OFFLOAD} 0.6"))
    for trainer in (plain, shared):
        trainer.forward_backward(batches(0, 2), 0)
    assert shared.engine.own_zeros().item() == plain.engine.own_zeros().item() >= 8 * 32
    whole, divided = (
        [one.engine.gradients.reducer.square().item(), one.engine.optimizer.square_of_weights().item()]
        for one in (plain, shared)
    )
    assert divided == pytest.approx(whole, rel=1e-12)
    shared.close()


def test_host_memory_that_does_not_suffice_is_told_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: RING_BYTES + (1 << 20))
    config = tiny_config(f"{OFFLOAD} 1")
    with pytest.raises(GptparError, match=r"needs .* of host memory in each of 1 process.*lower --cpu-optimizer-ratio"):
        build._speculated_elements(config, StateSize(10**9, ADAMW.state_bytes(4)))


def test_speculation_gets_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 10**8
    free = math.ceil((RING_BYTES + 18 * elements) / 0.9) + 100
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    automatic = build._speculated_elements(tiny_config(f"{OFFLOAD} 1"), StateSize(elements, ADAMW.state_bytes(4)))
    assert automatic == pytest.approx(elements / 2, rel=1e-6)
    off = tiny_config(f"{OFFLOAD} 1 --offload-speculation off")
    assert build._speculated_elements(off, StateSize(elements, ADAMW.state_bytes(4))) == 0
    with pytest.raises(GptparError, match="twice for --offload-speculation on"):
        build._speculated_elements(
            tiny_config(f"{OFFLOAD} 1 --offload-speculation on"), StateSize(elements, ADAMW.state_bytes(4))
        )


def test_a_save_finds_the_state_of_one_home_at_a_time() -> None:
    """The device's at its begin, and the host's later, where the views that it has taken show it."""
    trainer = make_trainer(tiny_config(config_words(f"{OFFLOAD} 0.3")))
    train(trainer, 0, 2)
    optimizer = trainer.engine.optimizer
    shown = {
        kind: [(unit, at, torch.full_like(values, 7)) for unit, at, values in views]
        for kind, views in optimizer.host_views().items()
    }
    both, device, host = map(optimizer.state_tensors, (None, Home.DEVICE, shown))
    for kind in optimizer.vectors:
        held = [sum(one.num_held for one in found[kind].values()) for found in (both, device, host)]
        assert held == [28032, 19622, 8410]  # 8410 = 0.3 x 28032
        assert both[kind].keys() == device[kind].keys() | host[kind].keys()
        assert {part.max().item() for one in host[kind].values() for _, part in one.parts} == {7}
        assert max(part.max().item() for one in device[kind].values() for _, part in one.parts) < 7
    trainer.close()
