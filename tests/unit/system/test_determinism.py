"""Deterministic kernels: what is set, what is refused, and that a run keeps its bits."""

import os

import pytest
import torch

from gptpar.errors import GptparError
from gptpar.system.determinism import deterministic


def test_settings_hold_inside_and_are_gone_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    assert not torch.are_deterministic_algorithms_enabled() and not torch._inductor.config.deterministic
    assert not {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"} & os.environ.keys()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "CUBLAS_WORKSPACE_CONFIG is :0:0, with which cuBLAS is not deterministic"),
        ("NCCL_ALGO", "NVLS,Ring", "NCCL_ALGO is NVLS,Ring, and NVLS adds in the order of arrival: set it to Ring or"),
    ],
)
def test_the_users_settings_are_not_overruled(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(GptparError, match=told), deterministic(True):
        pass
