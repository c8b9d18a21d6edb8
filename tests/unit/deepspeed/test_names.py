"""Tests of the lists of DeepSpeed's names: each is somewhere, or refused with a way out."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

import gptpar.deepspeed as deepspeed
from gptpar.cli.as_deepspeed import STAND_IN, with_stand_in
from gptpar.deepspeed.names import HOMES, PLACES, REFUSED, VERSION
from gptpar.errors import GptparError

NAMES = sorted({name for names in PLACES.values() for name in names.split()})
REFUSED_NAMES = sorted({name for names in REFUSED.values() for name in names.split()})


def test_each_name_of_each_module_is_there_or_refused() -> None:
    assert sorted({*HOMES} | {*REFUSED_NAMES}) == NAMES
    for place, names in PLACES.items():
        module = importlib.import_module(f"gptpar.deepspeed.{place}".rstrip("."))
        for name in names.split():
            assert getattr(module, name) is not None, (place, name)


def test_a_refused_name_can_be_imported_and_says_what_to_do_instead() -> None:
    from gptpar.deepspeed.sequence.layer import _SeqAllToAll  # accelerate imports it, and does not use it

    with pytest.raises(GptparError, match="deepspeed's _SeqAllToAll is not in gptpar: sequences are not divided"):
        _SeqAllToAll.apply(None, None)
    with pytest.raises(GptparError, match="InferenceEngine is not in gptpar: gptpar trains; for inference use"):
        deepspeed.InferenceEngine(None)
    assert not isinstance(deepspeed.zero, deepspeed.InferenceEngine)


def test_a_name_that_deepspeed_lacks_is_no_attribute() -> None:
    assert not hasattr(deepspeed, "initialise") and not hasattr(deepspeed.zero, "init")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gptpar.deepspeed.runtime.nothing")


def test_functions_of_torch_distributed_are_in_comm() -> None:
    import torch.distributed as dist

    assert deepspeed.comm.all_reduce is dist.all_reduce


def test_the_stand_in_says_the_version() -> None:
    (described,) = STAND_IN.glob("*.dist-info")
    assert described.name == f"deepspeed-{VERSION}.dist-info"
    assert f"Version: {VERSION}\n" in (described / "METADATA").read_text()


FUNCTION = """
import torch, deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        missing = [] if weight.ds_status is ZeroParamStatus.AVAILABLE else [weight]
        with deepspeed.zero.GatheredParameters(missing):
            return grad @ weight, grad.T @ x

class Head(torch.nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight).sum()

for more in ({}, {"offload_param": {"device": "cpu"}}):  # the second one's parameters come and go
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, **more}}
    engine = deepspeed.initialize(model=Head(2, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 2, requires_grad=True)))
    assert deepspeed.utils.safe_get_full_grad(engine.module.weight).tolist() == [[1, 1], [1, 1]]
    engine.destroy()
"""


def test_a_function_finds_deepspeeds_status_on_the_weight_that_it_saved() -> None:
    """TRL's loss asks for it under ZeRO-3."""
    environment = with_stand_in({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        [sys.executable, "-c", FUNCTION], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
