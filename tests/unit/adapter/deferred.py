"""Modules that are built without memory, and their values made later."""

from collections.abc import Callable

import torch
from torch import nn

import gptpar
from gptpar.adapter.deferred import Recording


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def defer(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Recording]:
    with gptpar.deferred_init(seed=seed) as recording:
        module = build()
    recording.check(module)
    assert all(tensor.is_meta and recording.knows(tensor) for tensor in tensors_of(module).values())
    return module, recording


def made(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, torch.Tensor]:
    module, recording = defer(build, seed)
    return {name: recording.make(tensor, "cpu", name) for name, tensor in tensors_of(module).items()}
