"""Tests of the lists of DeepSpeed's names: each is somewhere, or refused with a way out."""

import importlib
import runpy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
import gptpar.deepspeed as deepspeed
from gptpar.cli.as_deepspeed import STAND_IN
from gptpar.deepspeed.names import HOMES, PLACES, REFUSED, VERSION
from gptpar.errors import GptparError

AVAILABLE = deepspeed.zero.ZeroParamStatus.AVAILABLE
NAMES = sorted({name for names in PLACES.values() for name in names.split()})
REFUSED_NAMES = sorted({name for names in REFUSED.values() for name in names.split()})


def test_each_name_of_each_module_is_there_or_refused() -> None:
    assert sorted({*HOMES} | {*REFUSED_NAMES}) == NAMES
    for place, names in PLACES.items():
        module = importlib.import_module(f"gptpar.deepspeed.{place}".rstrip("."))
        for name in names.split():
            assert getattr(module, name) is not None, (place, name)
    assert deepspeed.comm.all_reduce is torch.distributed.all_reduce


def test_a_refused_name_can_be_imported_and_says_what_to_do_instead() -> None:
    from gptpar.deepspeed.sequence.layer import _SeqAllToAll  # accelerate imports it, and does not use it

    with pytest.raises(GptparError, match="deepspeed's _SeqAllToAll is not in gptpar: sequences are not divided"):
        _SeqAllToAll.apply(None, None)
    with pytest.raises(GptparError, match="InferenceEngine is not in gptpar: gptpar trains; for inference use"):
        deepspeed.InferenceEngine(None)
    assert not isinstance(deepspeed.zero, deepspeed.InferenceEngine)


def test_what_is_absent_is_no_attribute_and_a_known_module_says_what_to_do_instead() -> None:
    assert not hasattr(deepspeed, "initialise") and not hasattr(deepspeed.zero, "init")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gptpar.deepspeed.runtime.nothing")
    with pytest.raises(ImportError, match=r"deepspeed.launcher.launch is not in gptpar: start programs by `gptpar la"):
        importlib.import_module("gptpar.deepspeed.launcher.launch")
    with pytest.raises(ImportError, match=r"cannot import name 'call_to_text' from .*deepspeed\.toml"):
        from gptpar.deepspeed.runtime.utils import call_to_text  # noqa: F401


def test_the_stand_in_says_the_version() -> None:
    (described,) = STAND_IN.glob("*.dist-info")
    assert described.name == f"deepspeed-{VERSION}.dist-info"
    assert f"Version: {VERSION}\n" in (described / "METADATA").read_text()


class Product(torch.autograd.Function):
    """Gathers its weight in the backward pass unless the weight is there, as TRL's loss does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with deepspeed.zero.GatheredParameters([] if weight.ds_status is AVAILABLE else [weight]):
            return grad @ weight, grad.T @ x


class Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight).sum()


@pytest.mark.parametrize("more", [{}, {"offload_param": {"device": "cpu"}}], ids=["stay", "come and go"])
def test_the_stand_in_gives_a_saved_weight_deepspeeds_status(more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(torch.Tensor, "ds_status", None, raising=False)
    runpy.run_path(str(STAND_IN / "deepspeed/__init__.py"), run_name="deepspeed")
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, **more}}
    engine = gptpar.initialize(model=Head(2, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 2, requires_grad=True)))
    assert engine.full_gradient("weight").tolist() == [[1, 1], [1, 1]]
    engine.close()
