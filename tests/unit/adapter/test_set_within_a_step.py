"""Weights and moments that the user sets between a backward pass and the step, beside torch's AdamW in fp64.

The CPU optimizer has worked ahead by then.
"""

import pytest
import torch

from tests.unit.adapter.beside_torch import KINDS, assert_close, engine_of, loss_of, network

STEPS = 4


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_a_step_goes_on_from_what_was_set(ratio: float, kind: str, local: bool) -> None:
    engine, other = engine_of("AdamW", ratio, gradient_clipping=0.0), network()
    plain = torch.optim.AdamW(other.parameters(), **KINDS["AdamW"][2])
    parameters = dict(other.named_parameters())
    for step in range(STEPS):
        loss_of(other, step).backward()
        engine.backward(loss_of(engine, step))
        for name in ("0.weight", "2.bias") if step else ():
            before = engine.weights.local(name, kind) if local else engine.weights.whole(name, kind)
            engine.weights.set(name, kind, 3 * before + 0.1, local=local)
            parameter = parameters[name]
            mine = parameter.data if kind == "weights" else plain.state[parameter][kind]
            assert torch.allclose(before.view_as(mine), mine, rtol=0, atol=1e-14)
            mine.mul_(3).add_(0.1)
        engine.step()
        plain.step()
        plain.zero_grad()
    engine.close()
    assert_close(engine.module.parameters(), other.parameters(), atol=1e-13)
