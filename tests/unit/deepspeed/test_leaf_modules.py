"""Tests of the marks of ``set_z3_leaf_modules``: by class, by name, by the end of a name, and taken away again."""

import pytest
from gptpar.deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from torch import nn

from gptpar.deepspeed.leaf_modules import mark_configured


class Experts(nn.ModuleList):
    """A class derived from another."""


def _model() -> nn.ModuleDict:
    return nn.ModuleDict({"experts": Experts([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize("wanted", [Experts, nn.ModuleList, "Experts", f"{__name__}.Experts"])
def test_a_class_its_base_and_their_names_mark_a_module_until_it_is_taken_away(wanted: type | str) -> None:
    model = _model()
    assert set_z3_leaf_modules(model, [wanted]) == [model["experts"]] == get_z3_leaf_modules(model)
    assert z3_leaf_module(model["experts"]) and not z3_leaf_module(model["head"])
    assert unset_z3_leaf_modules(model, [wanted]) == [model["experts"]]
    assert get_z3_leaf_modules(model) == []


def test_names_and_ends_of_names_mark_modules_and_those_of_none_are_returned_or_an_error() -> None:
    model = _model()
    assert set_z3_leaf_modules_by_name(model, ["head", "tail"], False) == ([model["head"]], ["tail"])
    first, second = model["experts"]
    assert set_z3_leaf_modules_by_suffix(model, [".1", ".0"]) == ([second, first], [])
    assert get_z3_leaf_modules(model) == [first, second, model["head"]]
    with pytest.raises(ValueError, match="no modules of the names"):
        set_z3_leaf_modules_by_name(model, ["tail"])
    with pytest.raises(ValueError, match="no module of the classes"):
        set_z3_leaf_modules(model, [nn.Conv2d])
    assert set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []


def test_a_configuration_marks_what_the_model_has_of_it() -> None:
    model = _model()
    mark_configured(model, {})
    assert get_z3_leaf_modules(model) == []
    mark_configured(model, {"classes": ["Experts", "Other"], "names": "head", "name_suffixes": ["s.1", "tail"]})
    assert get_z3_leaf_modules(model) == [model["experts"], model["experts"][1], model["head"]]
