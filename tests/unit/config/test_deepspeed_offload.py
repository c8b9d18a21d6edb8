"""Number formats, ZeRO and offload of DeepSpeed's JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.config.deepspeed_files import BATCH, RATE, parsed_with, resolved


def test_fp16_scales_as_in_deepspeed(folder: Path) -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    p = resolved({**BATCH, **RATE, "fp16": fp16})[0].precision
    assert p.dtype == "fp16" and p.loss_scale is None and p.initial_loss_scale == 65536
    assert (p.loss_scale_window, p.hysteresis, p.min_loss_scale) == (500, 3, 2)
    p = resolved({**BATCH, **RATE, "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8}})[0].precision
    assert (p.loss_scale, p.initial_loss_scale) == (128, 256)


def offload(**keys: object) -> dict[str, Any]:
    return {**BATCH, **RATE, "zero_optimization": {"stage": 2, "offload_optimizer": keys}}


def test_offload_of_the_optimizer(folder: Path) -> None:
    assert resolved(offload(device="cpu"))[0].offload.ratio == 1.0
    assert resolved(offload(device="cpu", ratio=0.25), "--cpu-optimizer-ratio 0.250")[0].offload.ratio == 0.25
    config, _ = resolved(offload(device="none", ratio=0.25))
    assert not config.offload.cpu_optimizer and config.parallel.zero_stage == 2
    assert resolved(offload(ratio=0.25), "--cpu-optimizer")[0].offload.ratio == 0.25
    legacy = {**BATCH, **RATE, "zero_optimization": {"cpu_offload": True}}
    assert resolved(legacy)[0].offload.cpu_optimizer


def test_optimizer_state_on_a_disk(folder: Path) -> None:
    config, _ = resolved(offload(device="nvme", nvme_path=str(folder)))
    assert config.offload.cpu_optimizer and config.offload.optimizer_nvme_path == str(folder)
    assert resolved(offload(device="cpu", nvme_path="/nowhere"))[0].offload.optimizer_nvme_path is None
    found = parsed_with(offload(device="cpu", nvme_path="/nowhere")).without_effect
    assert "zero_optimization.offload_optimizer.nvme_path: it is for NVMe" in found
