"""This process's elements of the parameters that an optimizer was given, and whether the optimizer can take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

NormFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LocalParameter:
    """One parameter, and this process's elements of it.

    Attributes:
        unit: the parameter's place among all, as text.
        group: number of its group.
        on_device: how many of the elements, the first ones, the device updates.
        local: this process's elements in the parameter's shape.
        flat: [n] the same memory, for the optimizer's own writes.
    """

    parameter: torch.Tensor
    unit: str
    group: int
    on_device: int
    local: torch.Tensor
    flat: torch.Tensor

    @property
    def offloaded(self) -> int:
        """Elements that the CPU updates."""
        return self.flat.numel() - self.on_device

    @property
    def has_masters(self) -> bool:
        """Whether its masters are wider than itself."""
        return self.flat.dtype.itemsize == 2

    def gradient(self) -> torch.Tensor | None:
        """The elements' gradient in the parameter's shape.

        Raises:
            RuntimeError: it is sparse.
        """
        grad = self.parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(f"parameter {self.unit} has a sparse gradient: make its embedding with sparse=False.")
        return None if grad is None else local_of(grad)

    def placed_alike(self, values: torch.Tensor) -> torch.Tensor:
        """This process's elements as what the parameter is; a DTensor's stay in the memory they are in."""
        spec = getattr(self.parameter, "_spec", None)
        return values if spec is None else DTensor(values, spec, requires_grad=False)


def local_of(values: torch.Tensor) -> torch.Tensor:
    """This process's elements: of a DTensor its shard, else everything; not recorded by autograd."""
    with torch.no_grad():
        return values.to_local() if hasattr(values, "to_local") else values


def version_of(values: torch.Tensor | None) -> tuple[int, int]:
    """Changes whenever the values are written in place: a DTensor counts operations on itself, its shard others."""
    return (0, 0) if values is None else (values._version, local_of(values)._version)


def split_parameters(groups: Sequence[Mapping[str, Any]], ratio: float) -> list[LocalParameter]:
    """The parameters of all groups in order; the device updates the first elements, exact to the element."""
    local = [(p, number, local_of(p)) for number, group in enumerate(groups) for p in group["params"]]
    total = sum(values.numel() for *_, values in local)
    left = total - round(ratio * total)
    split = []
    for place, (parameter, group, values) in enumerate(local):
        on_device = min(left, values.numel())
        left -= on_device
        # .data counts its own versions, so that the optimizer's writes are told from others'.
        split.append(LocalParameter(parameter, str(place), group, on_device, values, values.data.view(-1)))
    return split


def tensors_of(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(parameters or groups as lists, for torch; every entry that should be a tensor)"""
    given: list[Any] = [{**g, "params": _listed(g["params"])} if isinstance(g, dict) else g for g in _listed(params)]
    entries = [entry for item in given for entry in (item["params"] if isinstance(item, dict) else [item])]
    return given, [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def problems_of(tensors: Sequence[Any]) -> list[str]:
    """Sentences on what cannot be optimized."""
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
    """Sentences on the groups' hyperparameters, each once."""
    problems: dict[str, None] = {}
    for group in groups:
        wrong = [name for name in ("lr", "eps", "weight_decay") if name in group and not group[name] >= 0]
        problems |= dict.fromkeys(f"{name} is {group[name]}, not at least 0" for name in wrong)
        betas = group.get("betas", ())
        problems |= dict.fromkeys(f"beta {beta} is not in [0, 1)" for beta in betas if not 0 <= beta < 1)
    return list(problems)


def sum_over_shards(parameters: Sequence[torch.Tensor]) -> NormFn | None:
    """What makes the global sum of squares of the local one, as far as the parameters tell; ``None``: nothing to add.

    Raises:
        ValueError: DTensors that are not all placed alike.
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
