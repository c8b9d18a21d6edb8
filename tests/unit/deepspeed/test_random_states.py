"""Tests of Megatron's random states in ``deepspeed.checkpointing``, and of recomputation that draws from them."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gptpar.deepspeed as deepspeed
from gptpar.deepspeed.recomputation import _configured
from gptpar.errors import ConfigError, GptparError

checkpointing = deepspeed.checkpointing


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    checkpointing.get_cuda_rng_tracker().reset()
    _configured.clear()


def drawn() -> float:
    return torch.rand(()).item()


def mpu(rank: int) -> Any:
    return types.SimpleNamespace(get_model_parallel_rank=lambda: rank)


def drawn_in_the_state() -> float:
    with checkpointing.get_cuda_rng_tracker().fork():
        return drawn()


def test_the_two_states_have_megatrons_seeds() -> None:
    """Of the processes that divide a layer, which another configuration keeps."""
    for configured, rank in ((mpu(0), 0), (mpu(3), 3), (None, 3)):
        checkpointing.configure(configured, checkpoint_in_cpu=configured is None)
        checkpointing.model_parallel_cuda_manual_seed(7)
        inside, outside = [drawn_in_the_state(), drawn_in_the_state()], drawn()
        torch.manual_seed(7)
        assert outside == drawn()
        torch.manual_seed(7 + 2718 + rank)
        assert inside == [drawn(), drawn()]
    checkpointing.model_parallel_reconfigure_tp_seed(8)
    inside = [drawn_in_the_state()]
    torch.manual_seed(8 + 2718 + 3)
    assert inside == [drawn()]


def test_a_state_goes_on_where_it_was_left() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(1)
    wanted = [drawn(), drawn()]
    found = []
    for _ in range(2):
        with tracker.fork("a"):
            found.append(drawn())
        drawn()
    assert found == wanted
    for name, seed in (("a", 2), ("b", 1)):
        with pytest.raises(GptparError, match=f"random state '{name}' with seed {seed}: the name or the seed is taken"):
            tracker.add(name, seed)
    with pytest.raises(GptparError, match="no random state 'model-parallel-rng'; known: a"), tracker.fork():
        pass
    known = r"known: none; call model_parallel_cuda_manual_seed\(seed\) first"
    with pytest.raises(GptparError, match=known), checkpointing.get_cuda_rng_tracker().fork():
        pass


def gradients(call: Callable[..., torch.Tensor], recomputes: bool, times: int = 3) -> list[torch.Tensor]:
    """Of several calls in a row; recomputation changes none of the numbers that later calls draw."""
    checkpointing.model_parallel_cuda_manual_seed(5)
    found = []
    for number in range(times):
        x = torch.linspace(-1, 1 + number, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        y = checkpointing.checkpoint(call, x) if recomputes else call(x)
        y.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return [*found, torch.tensor([drawn()])]


def dropout_in_both_states(x: torch.Tensor) -> torch.Tensor:
    with checkpointing.get_cuda_rng_tracker().fork():
        y = torch.dropout(x * x, 0.5, True)
    return torch.dropout(y * x, 0.3, True)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788 * x * (1.0 + 0.044715 * x * x)))


@pytest.mark.parametrize("call", [dropout_in_both_states, lambda x: scripted(x @ x.T) @ x])
def test_recomputation_changes_no_gradient(call: Callable[..., torch.Tensor]) -> None:
    """Drawn numbers are those of the forward pass; a TorchScript function runs in its first call as in later ones."""
    again = gradients(call, recomputes=True)
    for got, want in zip(again, gradients(call, recomputes=False), strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


def test_a_key_that_is_there_twice_is_named() -> None:
    read = deepspeed.runtime.config_utils.dict_raise_error_on_duplicate_keys
    assert read([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="has a more than once"):
        read([("a", 1), ("b", 2), ("a", 3)])
    assert deepspeed.runtime.config_utils.get_scalar_param({"a": 1}, "b", 2) == 2
