"""The banner says how Muon updates its matrices."""

from __future__ import annotations

import pytest

from gptpar.run.banner import muon_rows
from tests.helpers import tiny_config


@pytest.mark.parametrize(
    ("flags", "value", "reason"),
    [
        (
            "",
            "updates x 0.2 x sqrt(max(rows, columns)), queries, keys and values apart",
            "momentum 0.95 with Nesterov's look-ahead, 5 iterations (quintic)",
        ),
        (
            "--muon-lr 0.02 --muon-scale-mode shape_scaling --muon-extra-scale-factor 1 --muon-qkv heads",
            "learning rate 0.02, updates x 1 x sqrt(max(1, rows / columns)), each head apart",
            "momentum 0.95 with Nesterov's look-ahead",
        ),
        (
            "--muon-scale-mode unit_rms_norm --muon-qkv fused --no-muon-nesterov --muon-momentum 0.9",
            "updates x 0.2 x sqrt(rows / columns), QKV as one matrix",
            "momentum 0.9, 5 iterations",
        ),
    ],
)
def test_it_says_the_settings(flags: str, value: str, reason: str) -> None:
    (row,) = muon_rows(tiny_config(f"--optimizer muon {flags}").optimizer)
    assert (row.name, row.value) == ("muon", value) and row.reason.startswith(reason)
    assert row.reason.endswith("embedding, LM head, norms and biases: AdamW")


def test_other_optimizers_have_no_such_row() -> None:
    assert muon_rows(tiny_config("").optimizer) == []
