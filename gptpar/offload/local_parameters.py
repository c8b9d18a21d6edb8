"""This process's elements of the parameters given to an optimizer, and checks that the optimizer supports them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gptpar.engine.table import ParameterTable
from gptpar.errors import wrong_type
from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import ParameterInfo

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

NormFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LocalParameter:
    """One parameter, and this process's elements of it.

    Attributes:
        unit: the parameter's index among all parameters, as text.
        group: number of its group.
        on_device: number of elements at the beginning that the device updates.
        local: this process's elements in the parameter's shape.
        flat: [n] the same memory, through which the optimizer writes.
    """

    parameter: torch.Tensor
    unit: str
    group: int
    on_device: int
    local: torch.Tensor
    flat: torch.Tensor

    @property
    def offloaded(self) -> int:
        """Number of elements that the CPU updates."""
        return self.flat.numel() - self.on_device

    @property
    def has_masters(self) -> bool:
        """Whether it has master weights, wider than itself."""
        return self.flat.dtype.itemsize == 2

    def gradient(self) -> torch.Tensor | None:
        """[n] the elements' gradient, contiguous: a view if the parameter's is.

        Raises:
            RuntimeError: it is sparse.
        """
        grad = self.parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(f"parameter {self.unit} has a sparse gradient: make its embedding with sparse=False.")
        return None if grad is None else local_of(grad).reshape(-1).contiguous()

    def placed_alike(self, values: torch.Tensor) -> torch.Tensor:
        """Wrap this process's elements like the parameter: as a DTensor of the same placement, if it is one."""
        spec = getattr(self.parameter, "_spec", None)
        return values if spec is None else DTensor(values, spec, requires_grad=False)


def local_of(values: torch.Tensor) -> torch.Tensor:
    """This process's elements, not recorded by autograd: the shard of a DTensor, all elements of another tensor."""
    with torch.no_grad():
        return values.to_local() if hasattr(values, "to_local") else values


def version_of(values: torch.Tensor | None) -> tuple[int, int]:
    """Changes whenever the values are written in place. A DTensor and its shard count their operations separately."""
    return (0, 0) if values is None else (values._version, local_of(values)._version)


def table_of(groups: Sequence[Mapping[str, Any]], ratio: float) -> tuple[ParameterTable, list[LocalParameter]]:
    """The parameters of all groups, each as a unit of the engine's table, which divides them between device and CPU."""
    given = [(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]
    local = {str(place): local_of(parameter) for place, (parameter, _) in enumerate(given)}
    table = ParameterTable.of(
        {unit: {unit: ParameterInfo(values.shape, Constant(0.0))} for unit, values in local.items()},
        ratio=ratio,
        group_of=lambda unit, _: given[int(unit)][1],
    )
    parameters = []
    for (unit, values), (parameter, group) in zip(local.items(), given, strict=True):
        on_device = min(table.on_device[unit], values.numel())  # the table counts a unit's padding
        # .data counts its own versions: version_of() does not see the optimizer's writes, only those of others.
        parameters.append(LocalParameter(parameter, unit, group, on_device, values, values.data.view(-1)))
    return table, parameters


def tensors_of(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(the parameters or groups as lists, for torch; all their entries, which should be tensors)"""
    if not isinstance(params, Iterable):
        raise ValueError(
            "TwinFlowAdamW: "
            + wrong_type("params", params, "parameters or groups are needed, such as model.parameters()")
        )
    params = _listed(params)
    if without := [place for place, group in enumerate(params) if isinstance(group, dict) and "params" not in group]:
        raise ValueError(f"TwinFlowAdamW: groups {without} have no 'params': name the parameters of each group there")
    given: list[Any] = [{**g, "params": _listed(g["params"])} if isinstance(g, dict) else g for g in params]
    entries = [entry for item in given for entry in (item["params"] if isinstance(item, dict) else [item])]
    return given, [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def problems_of(tensors: Sequence[Any]) -> list[str]:
    """Sentences that say which parameters cannot be optimized, and why."""
    if not tensors:
        return ["there are no parameters"]
    problems, fit = [], []
    for place, tensor in enumerate(tensors):
        wrong = _problems_of_one(tensor)
        problems += [f"parameter {place} {words}" for words in wrong]
        fit += [] if wrong else [tensor]
    if len(devices := sorted({str(t.device) for t in fit})) > 1:
        problems.append(f"the parameters are on several devices ({', '.join(devices)}): make an optimizer for each")
    if len({t.dtype == torch.float64 for t in fit}) > 1:
        problems.append("fp64 parameters cannot share an optimizer with others: their state is fp64, too")
    return problems


def _problems_of_one(tensor: Any) -> list[str]:
    if not isinstance(tensor, torch.Tensor):
        return [f"is no tensor but a {type(tensor).__name__}"]
    problems = []
    if tensor.layout != torch.strided:
        problems.append(f"is sparse ({tensor.layout})")
    elif not local_of(tensor).is_contiguous():
        problems.append(f"is not contiguous: its strides are {tensor.stride()}")
    if tensor.dtype not in DTYPES:
        problems.append(f"is {str(tensor.dtype).removeprefix('torch.')}, not fp32, fp64, bf16 or fp16")
    if not tensor.is_leaf:
        problems.append("is no leaf of the graph: give the optimizer what the model computes with")
    if tensor.device.type == "meta":
        problems.append("has no memory yet (device meta)")
    return problems


def problems_of_hyperparameters(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences that say what is wrong with the groups' hyperparameters, each once."""
    problems: dict[str, None] = {}
    for group in groups:
        wrong = [name for name in ("lr", "eps", "weight_decay") if name in group and not is_within(group[name], 0)]
        problems |= dict.fromkeys(f"{name} is {group[name]!r}, not at least 0" for name in wrong)
        betas = group.get("betas", (0, 0))
        if not isinstance(betas, Iterable) or len(betas := list(betas)) != 2:
            problems[f"betas is {betas!r}, not two numbers"] = None
            continue
        wrong_betas = [beta for beta in betas if not is_within(beta, 0, 1) or beta == 1]
        problems |= dict.fromkeys(f"beta {beta!r} is not in [0, 1)" for beta in wrong_betas)
    return list(problems)


def is_within(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether a user's value is a number in a range."""
    try:
        return bool(least <= value <= most)
    except (TypeError, ValueError, RuntimeError):  # no number, or a tensor of several
        return False


def sum_over_shards(parameters: Sequence[torch.Tensor]) -> NormFn | None:
    """A function from this process's sum of squares to that of all processes, derived from the parameters' placements.

    Returns:
        ``None`` if no parameter is a DTensor.

    Raises:
        ValueError: the parameters' placements differ.
    """
    layouts = {(getattr(p, "device_mesh", None), getattr(p, "placements", ())) for p in parameters}
    if layouts == {(None, ())}:
        return None
    if len(layouts) > 1:
        raise ValueError(
            f"the parameters are divided over processes in {len(layouts)} ways: pass norm_fn, which turns this "
            "process's sum of squares (fp64 scalar) into that of all processes."
        )
    mesh, placements = layouts.pop()
    assert mesh is not None
    groups = [mesh.get_group(axis) for axis, placement in enumerate(placements) if placement.is_shard()]

    def add(square: torch.Tensor) -> torch.Tensor:
        for group in groups:
            dist.all_reduce(square, group=group)
        return square

    return add
