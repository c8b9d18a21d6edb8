"""DeepSpeed's Muon in a configuration of ``gptpar pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptpar.config import OptimizerConfig
from tests.unit.config.deepspeed_files import BATCH, resolved


def muon(params: dict[str, Any]) -> dict[str, Any]:
    """A file with this Muon."""
    return {**BATCH, "optimizer": {"type": "Muon", "params": params}}


def read(params: dict[str, Any]) -> OptimizerConfig:
    """The optimizer of a run with this Muon."""
    return resolved(muon(params))[0].optimizer


def test_it_has_deepspeeds_settings(folder: Path) -> None:
    o = read({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_method": "gram"})
    assert (o.optimizer, o.lr, o.muon_lr, o.weight_decay, o.muon_momentum) == ("muon", 0.02, 0.02, 0.1, 0.9)
    assert (o.muon_coefficient_type, o.muon_num_ns_steps, o.muon_scale_mode) == ("simple", 5, "shape_scaling")
    assert (o.muon_extra_scale_factor, o.muon_nesterov, o.muon_qkv) == (1.0, True, "split")
    assert (o.adam_beta1, o.adam_beta2, o.adam_eps) == (0.9, 0.95, 1e-10)


@pytest.mark.parametrize(
    ("params", "adam", "muon"),
    [
        ({"lr": 1e-3}, 1e-3, 1e-3),
        ({"lr": 1.0, "adam_lr": 3e-4, "muon_lr": 0.02}, 3e-4, 0.02),
        ({"adam_lr": 3e-4, "muon_lr": 0.02, "per_head_muon": True}, 3e-4, 0.02),
    ],
)
def test_rates_of_one_kind_overrule_the_rate_of_both(
    folder: Path, params: dict[str, Any], adam: float, muon: float
) -> None:
    o = read(params)
    assert (o.lr, o.muon_lr) == (adam, muon)
    assert o.muon_qkv == ("heads" if "per_head_muon" in params else "split")
