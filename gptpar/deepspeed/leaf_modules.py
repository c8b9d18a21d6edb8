"""``deepspeed.utils.set_z3_leaf_modules``: a mark on modules that DeepSpeed gathers as a whole.

Nothing else depends on the mark: a unit of the engine is always gathered as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gptpar.deepspeed.zero_config import DeepSpeedZeroLeafModuleConfig

_MARK = "ds_is_leaf_module"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module has the mark."""
    return getattr(model, _MARK, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that have it."""
    return [one for one in model.modules() if z3_leaf_module(one)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and of classes derived from them.

    Args:
        leaf_module_classes: classes, their names, or their names behind those of their modules.

    Raises:
        ValueError: there is none, unless ``raise_if_not_found`` is false.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away; the arguments are those of :func:`set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in the model; returns them and the names of none.

    Raises:
        ValueError: no module has a name, unless ``raise_if_not_found`` is false.
    """
    return _mark_named(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by the ends of names."""
    return _mark_named(model, module_name_suffixes, str.endswith, raise_if_not_found)


def mark_configured(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules that the configuration's section ``leaf_module`` names, as far as the model has them."""
    named = DeepSpeedZeroLeafModuleConfig(**section)
    set_z3_leaf_modules(model, named.classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, named.names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, named.name_suffixes, raise_if_not_found=False)


def _mark(model: nn.Module, classes: Sequence[type | str], value: bool, must_find: bool) -> list[nn.Module]:
    chosen = [one for one in model.modules() if _names_of(one) & {*classes}]
    if must_find and not chosen:
        raise ValueError(f"the model has no module of the classes {[*classes]}")
    for one in chosen:
        setattr(one, _MARK, value)
    return chosen


def _names_of(module: nn.Module) -> set[Any]:
    kinds = type(module).__mro__
    return {*kinds, *(kind.__name__ for kind in kinds), *(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)}


def _mark_named(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], must_find: bool
) -> tuple[list[nn.Module], list[str]]:
    matches = {one: [module for name, module in model.named_modules() if fits(name, one)] for one in wanted}
    missing = [one for one, found in matches.items() if not found]
    if must_find and missing:
        raise ValueError(f"the model has no modules of the names {missing}")
    chosen = list(dict.fromkeys(module for found in matches.values() for module in found))
    for one in chosen:
        setattr(one, _MARK, True)
    return chosen, missing
