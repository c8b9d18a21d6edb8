"""Whole runs with an offloaded partition: the same bits at every ratio, overflows, speculation, memory, and saves."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptpar import TwinFlowAdamW
from gptpar.engine.ranges import Home
from gptpar.errors import GptparError
from gptpar.offload import build, machine
from gptpar.offload.buckets import StateSize
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.optim.adamw import ADAMW
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, batches, config_words, hash_of, train

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
        losses = train(trainer, 0, STEPS)
        assert trainer.host is not None
        redone.append(trainer.host.num_redone)
        states.append((losses, hash_of(trainer)))
        trainer.close()
    assert redone[0] == 0 and 0 < redone[1] < STEPS
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
        build._speculated_elements(config.offload, StateSize(10**9, ADAMW.state_bytes(4)))


def test_speculation_gets_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 10**8
    free = math.ceil((RING_BYTES + 18 * elements) / 0.9) + 100
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    size = StateSize(elements, ADAMW.state_bytes(4))
    automatic = build._speculated_elements(tiny_config(f"{OFFLOAD} 1").offload, size)
    assert automatic == pytest.approx(elements / 2, rel=1e-6)
    off = tiny_config(f"{OFFLOAD} 1 --offload-speculation off")
    assert build._speculated_elements(off.offload, size) == 0
    with pytest.raises(GptparError, match="twice for --offload-speculation on"):
        build._speculated_elements(tiny_config(f"{OFFLOAD} 1 --offload-speculation on").offload, size)


@pytest.mark.parametrize("names", [build.FLAGS, build.Names("gptpar.initialize", "", "offload_optimizer.ratio")])
def test_a_disk_that_does_not_suffice_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: build.Names
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    offload = tiny_config(f"{OFFLOAD} 0.5 --optimizer-nvme-path {tmp_path}").offload
    told = rf"^{names.asker}: this machine's processes need 1.12 GiB in {tmp_path} and 1.00 MiB are free: lower "
    with pytest.raises(GptparError, match=f"{told}{names.ratio} 0.5, "):
        build._speculated_elements(offload, StateSize(10**8, ADAMW.state_bytes(4)), names=names)


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


# --- Where an element is updated changes no bit: the same weights and moments at every ratio --------------------


def state_after(words: str, ratio: str, *, count: int) -> tuple[str, int]:
    """The hash after twelve steps, and how many of them were clipped."""
    trainer = make_trainer(tiny_config(config_words(f"{words} --max-position-embeddings 24 {OFFLOAD} {ratio}")))
    norms = [norm for _, norm, _ in train(trainer, 0, STEPS, count)]
    found = hash_of(trainer)
    trainer.close()
    return found, sum(norm > 0.9 for norm in norms)


ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
EIGHT = ROUNDED.replace("bf16", "fp8")


@pytest.mark.parametrize(
    ("dtype", "count", "speculation"),
    [
        ("--bf16", 1, "on"),
        pytest.param(f"--bf16 {ROUNDED}", 1, "on", marks=pytest.mark.slow),
        (f"--bf16 {EIGHT}", 1, "on"),
        pytest.param("--bf16", 2, "off", marks=pytest.mark.slow),
        pytest.param("", 2, "off", marks=pytest.mark.slow),
        pytest.param("--fp64", 1, "on", marks=pytest.mark.slow),
        pytest.param("--fp16 --initial-loss-scale 3000", 2, "on", marks=pytest.mark.slow),
    ],
)
def test_no_ratio_changes_a_bit(dtype: str, count: int, speculation: str) -> None:
    """One micro-batch, whose gradient may travel in 16 bits, and two, whose sum may not; some steps are clipped."""
    words = f"{dtype} --clip-grad 0.9 --micro-batch-size {4 // count} --offload-speculation {speculation}"
    found = [state_after(words, ratio, count=count) for ratio in RATIOS]
    assert 0 < found[0][1] < STEPS
    assert len(set(found)) == 1, found


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float64)),
    ],
)
def test_no_ratio_changes_a_bit_of_any_module(dtype: torch.dtype) -> None:
    """TwinFlowAdamW, with two groups, a parameter that has no gradient now and then, clipping and other rates."""
    states = []
    for ratio in (0.0, 0.3, 0.731, 1.0):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(17, 17, dtype=dtype) for _ in range(3))
        groups = [
            {"params": list(layers[0].parameters()), "weight_decay": 0.0},
            {"params": list(layers[1:].parameters())},
        ]
        with TwinFlowAdamW(groups, lr=1e-2, offload_ratio=ratio, max_norm=0.3) as optimizer:
            for step in range(20):
                x = torch.randn(8, 17, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
                used = layers if step % 3 else layers[:2]
                for layer in used:
                    x = layer(x).tanh()
                (x.square().sum() * (10.0 if step % 4 else 0.01)).backward()
                optimizer.param_groups[1]["lr"] = 1e-2 / (1 + step)
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.state_dict()["state"]
        states.append(
            [p.detach().clone() for p in layers.parameters()] + [t for s in state.values() for t in s.values()]
        )
    for other in states[1:]:
        assert len(other) == len(states[0])
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))
