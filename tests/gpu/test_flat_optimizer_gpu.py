"""The device's AdamW on a GPU, by our kernel and by torch's, against torch's AdamW in double precision."""

from dataclasses import replace

import pytest
import torch

from gptpar.optim.adamw import ADAMW
from gptpar.optim.group_ranges import Family
from tests.unit.engine.flat_optimizer_case import GRADS, assert_follows_torch, make
from tests.unit.engine.four_groups import JOINED, SEPARATE, flat_after

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("grad", GRADS)
def test_it_is_torchs_adamw(by_torch: bool, grad: str) -> None:
    assert_follows_torch(make("cuda", grad, by_torch=by_torch), 1e-5)


@pytest.mark.parametrize("by_torch", [True, False])
def test_double_precision_is_kept(by_torch: bool) -> None:
    assert_follows_torch(make("cuda", "float64", "float64", by_torch=by_torch), 1e-12)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("families", [SEPARATE, JOINED], ids=str)
def test_groups_have_the_cpus_bits(by_torch: bool, families: tuple[Family, ...]) -> None:
    """Own launches of groups that share nothing, over model parameters of two dtypes, and over padding."""
    made = replace(ADAMW, device_kernel=None) if by_torch else ADAMW
    for ours, true in zip(flat_after("cuda", families, made), flat_after("cpu", SEPARATE), strict=True):
        assert torch.equal(ours, true)
