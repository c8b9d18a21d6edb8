"""The checksum of replicated weights."""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_flipped_bit_of_any_element_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.zeros(40, dtype=dtype)
    bits = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    found = {checksum(values).item()}
    for place in range(len(values)):
        for bit in (0, 5, 8 * dtype.itemsize - 2):
            bits[place] ^= 1 << bit
            found.add(checksum(values).item())
            bits[place] ^= 1 << bit
    assert 0 in found and len(found) > 40
    assert checksum(values) == 0
    values[3], values[4] = 1.0, 2.0
    swapped = values.clone()
    swapped[3], swapped[4] = 2.0, 1.0
    assert checksum(values) != checksum(swapped)
