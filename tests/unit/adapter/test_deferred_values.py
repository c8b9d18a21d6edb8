"""Tensors of a deferred model: they look as if they were there, are made alone, and follow changes or say so."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.units import find_units
from gptpar.errors import GptparError, ModelError
from tests.unit.adapter.deferred import defer, made
from tests.unit.adapter.huggingface import tiny_hf


def test_tensors_look_as_if_they_were_on_the_cpu_until_the_context_ends():
    with gptpar.deferred_init():
        tensor = torch.ones(3)
        assert tensor.device == torch.device("cpu") and tensor.is_cpu and not tensor.is_meta
        assert copy.deepcopy(tensor).tolist() == [1, 1, 1]
    assert tensor.is_meta
    with pytest.raises(ZeroDivisionError), gptpar.deferred_init():
        nn.Linear(1 // 0, 1)
    assert not nn.Linear(2, 2).weight.is_meta


def test_what_is_overwritten_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.weight)
        layer.bias.data.copy_(torch.arange(4.0))
        return layer

    module, recording = defer(build)
    calls, call = [], recording._tape.call
    monkeypatch.setattr(recording._tape, "call", lambda op, *rest: (calls.append(str(op.function)), call(op, *rest))[1])
    recording.make(module.weight)
    assert calls == ["aten.normal_.default"]
    assert recording.make(module.bias).tolist() == [0, 1, 2, 3]
    assert not any("uniform" in name for name in calls) and calls[-1] == "aten.copy_.default"


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 4)], ids=["first", "last"])
def test_a_slice_that_is_overwritten_leaves_the_rest(rows: slice):
    with gptpar.deferred_init() as recording:
        table = torch.arange(8).view(4, 2)
        table[rows].zero_()
        table[rows.start : rows.stop, 1].copy_(table[:2, 1] + table[2:, 0])
    expected = torch.arange(8).view(4, 2)
    expected[rows] = 0
    expected[rows, 1] = expected[:2, 1] + expected[2:, 0]
    assert torch.equal(recording.make(table), expected)
    part = recording.make(table[rows])
    assert torch.equal(part, expected[rows]) and part.untyped_storage().nbytes() == 4 * 8


def test_parameters_stay_the_same_objects_and_can_be_swapped():
    module, recording = defer(lambda: tiny_hf("GPT-2"))
    plan = find_units(module)
    assert module.lm_head.weight is module.transformer.wte.weight
    parameters = dict(module.named_parameters())
    for unit in plan.units:
        for name in unit.parameters:
            values = recording.make(parameters[name], "cpu", name)
            torch.utils.swap_tensors(parameters[name], nn.Parameter(values))
    for name, buffer in module.named_buffers():
        torch.utils.swap_tensors(buffer, recording.make(buffer, "cpu", name))
    assert dict(module.named_parameters()) == parameters
    assert module.lm_head.weight is module.transformer.wte.weight
    loss = module(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss
    assert loss.item() == pytest.approx(math.log(61), abs=0.3)


def test_plain_attributes_get_values():
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.mask = torch.ones(3).cumsum(0)
            self.more = {"tables": [torch.arange(2), (torch.zeros(1), "text")]}
            self.tied = [self.weight, self.mask]

    module, recording = defer(Keeps)
    recording.make_attributes(module)
    assert module.mask.tolist() == [1, 2, 3]
    assert module.more["tables"][0].tolist() == [0, 1] and module.more["tables"][1][1] == "text"
    assert module.tied[0] is module.weight and module.weight.is_meta and module.tied[1] is module.mask


def test_tensors_with_memory_are_copied():
    mine = torch.arange(3.0)
    with gptpar.deferred_init() as recording:
        module = nn.ParameterDict({"theirs": mine, "derived": torch.zeros(3).add_(mine)})
        mine.add_(1)
        mine.mul_(torch.full((3,), 2.0))
    recording.check(module)
    assert mine.tolist() == [2, 4, 6]
    assert recording.make(module.theirs).tolist() == [2, 4, 6] and recording.make(module.theirs) is not module.theirs
    assert recording.make(module.derived).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16(),
        lambda model: nn.init.zeros_(model.weight),
        lambda model: model.load_state_dict(nn.Linear(3, 3).state_dict()),
        lambda model: setattr(model, "weight", nn.Parameter(torch.empty(3, 3, device="meta"))),
    ],
    ids=["cast", "initialised", "loaded", "another"],
)
@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_changes_after_the_context_are_told(change: Callable[[nn.Module], object]):
    model, recording = defer(lambda: nn.Linear(3, 3))
    change(model)
    assert not recording.knows(model.weight)
    with pytest.raises(GptparError, match="the values of first.weight are not known"):
        recording.make(model.weight, "cpu", "first.weight")
    with pytest.raises(ModelError, match="weight are not known"):
        recording.check(model)


def test_values_from_outside_are_told():
    outside = torch.empty(3, device="meta")
    with gptpar.deferred_init() as recording:
        model = nn.ParameterDict({"sum": torch.ones(3) + outside, "all": torch.ones(3)})
        outside.zero_()
        model["written"] = outside + 1
    with pytest.raises(GptparError, match="sum cannot be made: its values depend on a tensor that was on the meta"):
        recording.make(model["sum"], "cpu", "sum")
    assert recording.make(model["written"]).tolist() == recording.make(model["all"]).tolist() == [1, 1, 1]


def test_memory_that_nobody_wrote_is_zero():
    assert made(lambda: nn.ParameterList([torch.empty(1000)]))["0"].count_nonzero() == 0
