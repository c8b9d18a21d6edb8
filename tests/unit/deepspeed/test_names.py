"""Tests of the lists of DeepSpeed's names: each is somewhere, or refused with a way out."""

from __future__ import annotations

import importlib

import pytest

import gptpar.deepspeed as deepspeed
from gptpar.cli.as_deepspeed import STAND_IN
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
