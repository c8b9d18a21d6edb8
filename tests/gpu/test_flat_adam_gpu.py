"""The device's AdamW on a GPU, by our kernel and by torch's, against torch's AdamW in double precision."""

from __future__ import annotations

import pytest

from tests.unit.test_flat_adam import GRADS, follows_torch, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("grad", GRADS)
def test_it_is_torchs_adamw(by_torch: bool, grad: str) -> None:
    follows_torch(make("cuda", grad, by_torch=by_torch), 1e-5)


@pytest.mark.parametrize("by_torch", [True, False])
def test_double_precision_is_kept(by_torch: bool) -> None:
    follows_torch(make("cuda", "float64", "float64", by_torch=by_torch), 1e-12)
