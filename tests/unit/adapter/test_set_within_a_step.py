"""Weights and moments that the user sets between a backward pass and the step, beside torch's AdamW in fp64.

The CPU optimizer has worked ahead by then.
"""

from typing import Any

import pytest
import torch

import gptpar
from tests.unit.adapter.beside_torch import KINDS, loss_of, make_config, network

STEPS = 4


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_a_step_goes_on_from_what_was_set(ratio: float, kind: str, local: bool) -> None:
    _, of_torch, params = KINDS["AdamW"]
    model, other = network(), network()
    optimizer, plain = of_torch(model.parameters(), **params), of_torch(other.parameters(), **params)
    config = make_config(ratio) | {"gradient_clipping": 0.0}
    engine: Any = gptpar.initialize(model=model, config=config, optimizer=optimizer)[0]
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
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-13)
    engine.close()
