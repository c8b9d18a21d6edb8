"""Whole runs with an offloaded partition: the same bits at every ratio, overflows, speculation, and memory."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptpar.engine.ranges import Home
from gptpar.errors import GptparError
from gptpar.offload import build, machine
from gptpar.offload.buckets import StateSize
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.optim.adamw import ADAMW
from tests.flat_parts import whole_tensors
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, assert_same_state, batches, config_words, run_of

STEPS = 8
ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
EIGHT = ROUNDED.replace("bf16", "fp8")
OVERFLOWS = "--fp16 --initial-loss-scale 1e6 --hysteresis 1"


@pytest.mark.parametrize(
    ("dtype", "count", "speculation"),
    [
        ("--bf16", 1, "on"),
        pytest.param(f"--bf16 {ROUNDED}", 1, "on", marks=pytest.mark.slow),
        (f"--bf16 {EIGHT}", 1, "on"),
        pytest.param("--bf16", 2, "off", marks=pytest.mark.slow),
        pytest.param("", 2, "off", marks=pytest.mark.slow),
        pytest.param("--fp64", 1, "on", marks=pytest.mark.slow),
        (OVERFLOWS, 2, "on"),
        pytest.param(OVERFLOWS, 1, "off", marks=pytest.mark.slow),
        ("--bf16 --optimizer lion", 1, "on"),
        pytest.param(f"{OVERFLOWS} --optimizer lion", 2, "on", marks=pytest.mark.slow),
    ],
)
def test_no_ratio_changes_a_bit(dtype: str, count: int, speculation: str) -> None:
    """Nor does speculation, which some clipped steps make wrong, nor a step that both homes skip.

    The gradient of one micro-batch may travel in 16 bits, the sum of two may not.
    """
    words = f"{dtype} --clip-grad 0.9 --max-position-embeddings 24 --offload-speculation {speculation}"
    plain, *others = (run_of(f"{words} {OFFLOAD} {ratio}", STEPS, count) for ratio in RATIOS)
    assert plain.clips_some(0.9) and plain.skips_some() == (OVERFLOWS in dtype)
    for other in others:
        assert_same_state(other, plain)
        assert (other.losses, other.skipped) == (plain.losses, plain.skipped)
        host, steps_taken = other.trainer.host, plain.trainer.engine.optimizer.steps_taken
        assert host is not None
        assert host.steps_taken == other.trainer.engine.optimizer.steps_taken == steps_taken
        assert (0 < other.redone < STEPS) == (speculation == "on")


def test_zeros_and_norms_count_both_shares() -> None:
    words = config_words("--log-num-zeros-in-grad --fp64 --max-position-embeddings 24")  # 8 rows get no gradient
    plain, shared = make_trainer(tiny_config(words)), make_trainer(tiny_config(f"{words} {OFFLOAD} 0.6"))
    for trainer in (plain, shared):
        trainer.forward_backward(batches(0, 2), 0)
    grads = whole_tensors(plain.engine.optimizer.parts("grad")).values()
    zeros = sum(int((grad == 0).sum()) for grad in grads)  # those of the padding between them do not count
    assert shared.engine.own_zeros().item() == plain.engine.own_zeros().item() == zeros >= 8 * 32
    whole, divided = (
        [one.engine.gradients.reducer.square().item(), one.engine.optimizer.square_of_weights().item()]
        for one in (plain, shared)
    )
    assert divided == pytest.approx(whole, rel=1e-12)
    shared.close()


def test_a_save_finds_the_state_of_one_home_at_a_time() -> None:
    """The device's at its begin, and the host's later, where the views that it has taken show it."""
    trainer = make_trainer(tiny_config(config_words(f"{OFFLOAD} 0.3")))
    optimizer = trainer.engine.optimizer
    shown = {
        kind: [(unit, at, torch.full_like(values, 7)) for unit, at, values in views]
        for kind, views in optimizer.host_views().items()
    }
    both, device, host = map(optimizer.state_tensors, (None, Home.DEVICE, shown))
    for kind in optimizer.vectors:
        held = [sum(one.num_held for one in found[kind].values()) for found in (both, device, host)]
        assert held == [28032, 19622, 8410]  # 8410 = 0.3 x 28032
        assert all(bool((part == 7).all()) for one in host[kind].values() for _, part in one.parts)
    trainer.close()


def test_speculation_gets_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not suffice, with speculation or even without, is told before anything is allocated."""
    automatic, off, on = (
        tiny_config(f"{OFFLOAD} 1 --offload-speculation {word}").offload for word in ("auto", "off", "on")
    )
    size = StateSize(10**8, ADAMW.state_bytes(4))
    free = math.ceil((RING_BYTES + 18 * size.elements) / 0.9) + 100
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    assert build._speculated_elements(automatic, size) == pytest.approx(size.elements / 2, rel=1e-6)
    assert build._speculated_elements(off, size) == 0
    with pytest.raises(GptparError, match="twice for --offload-speculation on"):
        build._speculated_elements(on, size)
    monkeypatch.setattr(machine, "available_memory", lambda: RING_BYTES + (1 << 20))
    with pytest.raises(GptparError, match=r"needs .* of host memory in each of 1 process.*lower --cpu-optimizer-ratio"):
        build._speculated_elements(automatic, size)


@pytest.mark.parametrize("names", [build.FLAGS, build.Names("gptpar.initialize", "", "offload_optimizer.ratio")])
def test_a_disk_that_does_not_suffice_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: build.Names
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    offload = tiny_config(f"{OFFLOAD} 0.5 --optimizer-nvme-path {tmp_path}").offload
    told = rf"^{names.asker}: this machine's processes need 1.12 GiB in {tmp_path} and 1.00 MiB are free: lower "
    with pytest.raises(GptparError, match=rf"{told}{names.ratio} \(now 0.5\), "):
        build._speculated_elements(offload, StateSize(10**8, ADAMW.state_bytes(4)), names=names)
