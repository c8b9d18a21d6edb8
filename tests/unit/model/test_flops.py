"""Counts of parameters and FLOPs that others have published, and the peaks of devices."""

from __future__ import annotations

import pytest

from gptpar.config import complete
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.model.gpt import gpt_model
from gptpar.model.spec import ModelSpec
from gptpar.plan.hardware import peak_flops


def described(preset: str, vocab_size: int, rows: int) -> ModelSpec:
    words = f"--preset {preset} --vocab-size {vocab_size} --pad-vocab-size-to {rows} --micro-batch-size 1 --mock-data"
    return gpt_model(
        complete(resolve(parse_flags(f"{words} --train-iters 1 --lr 1 --eval-iters 0".split()), 1)[0]).model
    )


def test_llama3_8b_matches_both_published_conventions() -> None:
    llama = described("8B", 128256, 128256)
    assert 13_812 * llama.flops_per_token(causal=False) / 1e12 == pytest.approx(800, abs=1)
    assert 14_451 * llama.flops_per_token(causal=True) / 1e12 == pytest.approx(744, abs=1)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 494.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ],
)
def test_peak_of_known_devices(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == tflops * 1e12
