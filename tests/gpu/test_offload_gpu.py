"""Offload on a GPU: the same numbers as without it, in every order of events, and memory that has left the device."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gptpar.offload import buckets, gpu_transfers, machine
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done
from gptpar.run import gpt
from gptpar.run.auto_offload import with_ratio
from gptpar.tensor_parallel import cross_entropy
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.gpu.offloaded_training import OFFLOAD, STEPS, Slow, assert_same_bits, run
from tests.helpers import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "words", [f"{OFFLOAD} 0.3", f"{OFFLOAD} 0.731", f"{OFFLOAD} 1", f"{OFFLOAD} 1 --cpu-parameters"]
)
@pytest.mark.parametrize("speculation", ["on", "off"])
def test_fp64_follows_the_run_without_offload(words: str, speculation: str) -> None:
    """Clipping in some steps."""
    plain, weights, _ = run("--fp64 --no-compile --clip-grad 1.75")
    found, shared, _ = run(f"--fp64 --no-compile --clip-grad 1.75 {words} --offload-speculation {speculation}")
    assert any(norm > 1.75 for _, norm, _ in plain) and any(norm < 1.75 for _, norm, _ in plain)
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    for name, values in weights.items():
        torch.testing.assert_close(shared[name], values, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("words", [f"{OFFLOAD} 0.7", f"{OFFLOAD} 1", f"{OFFLOAD} 1 --offload-speculation off"])
def test_a_step_in_recorded_parts_is_bit_identical(
    words: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--bf16 --clip-grad 1.75 {words} --micro-batch-size {4 // micro_batches}"
    one_by_one = run(f"{words} --cuda-graph off", micro_batches=micro_batches)
    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: Slow(threads))
    monkeypatch.setattr(gpu_transfers, "RING_BYTES", 1)  # gradients wait on the device
    in_parts = run(f"{words} --cuda-graph on", micro_batches=micro_batches)
    assert_same_bits(in_parts, one_by_one)


class InParts(CpuAdam):
    """Counts the updates without the looked-up rows, or of these alone."""

    parts = 0

    def order(self, *args: Any, only: np.ndarray | None = None, **kwargs: Any) -> Callable[[], Done]:
        InParts.parts += only is not None
        return super().order(*args, only=only, **kwargs)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ring_bytes", [1, gpu_transfers.RING_BYTES])
@pytest.mark.parametrize("clip, ratio", [("1000", "1"), ("1000", "0.99"), ("1.75", "1")])
def test_an_early_gradient_of_the_embedding_changes_no_bit(
    clip: str, ratio: str, ring_bytes: int, micro_batches: int, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens in each step; the device is held up after each piece of it, so that the host is done with that."""
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 10)
    monkeypatch.setattr(cross_entropy, "ROW_TILE", 8)
    words = f"--bf16 --clip-grad {clip} {OFFLOAD} {ratio} --micro-batch-size {4 // micro_batches}"
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "tied_unit", lambda *_: None)
        plain = run(f"{words} --offload-speculation off --cuda-graph off", micro_batches=micro_batches)
    offer = HostOptimizer.submit_gradient

    def held_up(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        offer(host, unit, grad, formed=formed)
        if formed is not None:
            torch.cuda._sleep(25_000_000)  # some 15 ms

    monkeypatch.setattr(HostOptimizer, "submit_gradient", held_up)
    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: InParts(threads))
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 3333)  # cuts rows of 128
    monkeypatch.setattr(machine, "BUCKET_ELEMENTS", 3333)
    monkeypatch.setattr(gpu_transfers, "RING_BYTES", ring_bytes)  # 1: three slots, of which two are not for early ones
    InParts.parts = 0
    early = run(f"{words} --offload-speculation on --cuda-graph {graph}", micro_batches=micro_batches)
    assert_same_bits(early, plain)
    assert clip != "1000" or InParts.parts >= 2 * STEPS  # a bucket may have none of a step's rows


def test_an_early_gradient_comes_before_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread updates the embedding but for some rows first of all, and these when everything else is done."""
    order: list[tuple[int, bool]] = []

    class Noting(Slow):
        def order(
            self, state: Sequence[torch.Tensor], *args: Any, only: np.ndarray | None = None, **kwargs: Any
        ) -> Callable[[], Done]:
            order.append((state[0].numel(), only is None))
            return super().order(state, *args, only=only, **kwargs)

    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: Noting(threads))
    run(f"--bf16 --clip-grad 1000 {OFFLOAD} 1 --offload-speculation on --cuda-graph off", steps=1)
    assert order[0] == (64 * 128, False)


@pytest.mark.parametrize("words", [f"{OFFLOAD} 0.7", f"{OFFLOAD} 1 --cpu-parameters"])
def test_sixteen_bits_stay_close(words: str) -> None:
    plain, _, _ = run("--bf16")
    found, _, _ = run(f"--bf16 {words}")
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in plain], rel=2e-2)


def test_fp16_overflows_are_skipped_alike() -> None:
    words = "--fp16 --no-compile --initial-loss-scale 1e7 --hysteresis 1"
    plain, _, _ = run(words)
    found, _, _ = run(f"{words} {OFFLOAD} 0.7")
    assert any(skipped for *_, skipped in plain)
    assert [skipped for *_, skipped in found] == [skipped for *_, skipped in plain]


def test_the_devices_share_is_what_the_ratio_says() -> None:
    """Measured: 12 bytes an element of master weights and moments, 4 of gradient sums."""
    sizes = {}
    for ratio in ("0", "0.5", "1"):
        _, _, trainer = run(f"--bf16 --no-compile {OFFLOAD} {ratio}", steps=1)
        optimizer = trainer.engine.optimizer
        buffers = (*optimizer.vectors.values(), optimizer.grad)
        sizes[ratio] = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert sizes["1"] == 0 and sizes["0.5"] == pytest.approx(sizes["0"] / 2, rel=0.01)


def test_auto_finds_that_a_small_model_needs_no_host() -> None:
    config = tiny_config(f"{OFFLOAD} auto --no-compile")
    assert with_ratio(config, Topology(Mesh(), 0, torch.device("cuda", 0))).offload.ratio == 0.0
