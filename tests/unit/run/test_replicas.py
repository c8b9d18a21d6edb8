"""The checksum of replicated weights."""

import pytest
import torch

from gptpar.run.health import replicas
from gptpar.run.health.replicas import checksum


def by_hand(values: torch.Tensor) -> int:
    """Of fp32, in Python's integers."""
    total = sum(bits * (2 * i + 1) for i, bits in enumerate(values.view(torch.int32).tolist()))
    return (total + 2**63) % 2**64 - 2**63


def test_it_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)) * 1e30
    assert checksum(values).item() == by_hand(values)
    monkeypatch.setattr(replicas, "BLOCK", 64)
    assert checksum(values).item() == by_hand(values)


def test_halves_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that the host updates and those of the device are summed apart."""
    monkeypatch.setattr(replicas, "BLOCK", 64)
    values = torch.randn(301, generator=torch.Generator().manual_seed(2))
    assert checksum(values) == checksum(values[:100]) + checksum(values[100:], 100)
