"""The user's own ``clip_grad_norm_`` clips where gradients are in ``.grad``, and is refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gptpar
from gptpar.errors import GptparError

OFFLOAD = {"device": "cpu", "ratio": 0.5}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
}


def after_backward(zero: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    engine = gptpar.initialize(model=nn.Linear(4, 1), config={**CONFIG, "zero_optimization": zero})[0]
    engine.backward(engine(torch.ones(4, 4)).square().sum() * 100)
    return engine


@pytest.mark.parametrize("zero", [{"stage": 0, "offload_optimizer": OFFLOAD}, {"stage": 1}, {"stage": 3}])
def test_it_is_refused_where_it_would_change_nothing(zero: dict[str, Any]) -> None:
    engine = after_backward(zero)
    trained = filter(lambda p: p.requires_grad, engine.parameters())
    for clip in (lambda: clip_grad_norm_(engine.parameters(), 0.1), lambda: clip_grad_value_(trained, 0.1)):
        with pytest.raises(GptparError, match="would change nothing: .* Set gradient_clipping in the configuration"):
            clip()
    assert len(list(engine.parameters())) == 2
    engine.step()
    engine.close()
    assert clip_grad_norm_(engine.parameters(), 0.1) == 0


def test_it_clips_where_gradients_are_shown() -> None:
    engine = after_backward({"stage": 0})
    assert clip_grad_norm_(engine.parameters(), 0.125) > 100
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(0.125, rel=1e-4)
