"""The device's AdamW on a GPU, compiled and not, against torch's AdamW in double precision."""

from __future__ import annotations

import pytest

from tests.unit.test_flat_adam import GRADS, follows_torch, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad", GRADS)
def test_it_is_torchs_adamw(compiled: bool, grad: str) -> None:
    follows_torch(make("cuda", grad, compiled=compiled), 1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_double_precision_is_kept(compiled: bool) -> None:
    follows_torch(make("cuda", "float64", "float64", compiled=compiled), 1e-12)
