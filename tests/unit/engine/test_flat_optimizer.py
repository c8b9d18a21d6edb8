"""AdamW over flat vectors: every way of computing it against torch's AdamW, whatever the stretches it is cut into."""

import pytest
import torch

from gptpar.engine import flat_optimizer
from tests.unit.engine.flat_optimizer_case import GRADS, assert_follows_torch, make


@pytest.mark.parametrize("way", ["kernel", "without a compiler", "by operators"])
@pytest.mark.parametrize("grad", GRADS)
def test_it_is_torchs_adamw(way: str, grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "kernel":
        monkeypatch.setattr("gptpar.optim.cpu_adam._library", lambda: None)
    assert_follows_torch(make(grad=grad, by_torch=way == "by operators"), 1e-5)


@pytest.mark.parametrize("by_torch", [False, True])
def test_double_precision_is_kept(by_torch: bool) -> None:
    assert_follows_torch(make(grad="float64", wide="float64", by_torch=by_torch), 1e-13)


def test_neighbours_are_updated_together() -> None:
    """As far as their live parameters lie behind each other, and blocks begin where they did."""
    memory, other = torch.zeros(512), torch.zeros(512)
    narrow = memory.view(torch.bfloat16)[256:512]  # the places of memory[128:256]
    whole = flat_optimizer._joined([(0, 128, memory[:128]), (128, 128, memory[128:128]), (128, 500, memory[128:500])])
    ((start, stop, live),) = whole
    assert (start, stop) == (0, 500) and live is not None
    assert live.data_ptr() == memory.data_ptr() and len(live) == 500
    for apart in (
        [(0, 128, memory[:128]), (128, 256, other[128:256])],
        [(0, 128, memory[:128]), (128, 256, memory[192:320])],
        [(0, 128, None), (128, 256, memory[128:256])],
        [(0, 128, memory[:128]), (128, 384, narrow)],
        [(0, 100, memory[:100]), (100, 200, memory[100:200])],  # no multiple of a block
        [(0, 128, memory[:128]), (192, 256, memory[128:192])],
    ):
        assert flat_optimizer._joined(apart) == apart
    assert flat_optimizer._joined([(0, 64, None), (64, 100, None)]) == [(0, 100, None)]
