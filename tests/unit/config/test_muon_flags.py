"""Muon's flags: ours, Megatron's, and what is wrong with some."""

from __future__ import annotations

import pytest

from gptpar.errors import ConfigError
from tests.helpers import tiny_config

MUON = "--optimizer muon"


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("", "muon_nesterov", True),
        ("--muon-no-nesterov", "muon_nesterov", False),
        ("--muon-nesterov", "muon_nesterov", True),
        ("--muon-no-split-qkv", "muon_qkv", "fused"),
        ("--muon-split-qkv-per-head", "muon_qkv", "heads"),
        ("--muon-tp-mode duplicated --muon-fp32-matmul-prec medium --muon-scalar-optimizer adam", "optimizer", "muon"),
        ("--use-layer-wise-distributed-optimizer", "optimizer", "muon"),
    ],
)
def test_megatrons_flags_mean_the_same(flags: str, field: str, value: object) -> None:
    assert getattr(tiny_config(f"{MUON} {flags}").optimizer, field) == value


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--muon-tp-mode blockwise", "a matrix is orthogonalized whole"),
        ("--muon-scalar-optimizer lion", "AdamW updates what Muon does not"),
        ("--muon-num-ns-steps 6", "takes 5, 10, ... iterations"),
        ("--muon-no-nesterov --muon-nesterov", "keep one"),
        ("--lr 0 --muon-lr 0.02", "give a rate above 0"),
        ("--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16 is built for --optimizer adam alone"),
    ],
)
def test_a_wrong_flag_is_told(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(f"{MUON} {flags}")
    assert problem in str(caught.value)
