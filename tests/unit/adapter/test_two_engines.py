"""Parameters of two engines as arguments of one function."""

from typing import Any

import pytest
import torch

from gptpar.errors import GptparError
from tests.unit.adapter.beside_torch import engine_of, train


def trained(**zero: Any) -> Any:
    """An engine after a step, whose parameters are guarded: they are still being updated, or in host memory."""
    offload = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    engine = engine_of("AdamW", 1.0, dtype=torch.float32, zero_optimization={"stage": 0, **offload, **zero})
    train(engine, 0, 1)
    return engine


@pytest.mark.parametrize("turned", [False, True])
def test_a_function_of_two_engines_parameters_is_guarded_for_both(turned: bool) -> None:
    """As an average of one model's weights in another one is."""
    engines = here, away = trained(), trained(stage=3, offload_param={"device": "cpu"})
    pair = [engine.module[0].weight for engine in (engines[::-1] if turned else engines)]
    with pytest.raises(GptparError, match=r"^0\.weight was read outside of the model's forward"):
        torch.lerp(*pair, 0.5)
    with away.gathered():
        assert torch.equal(*pair)
    here.close()
    away.close()
