"""DeepSpeed's estimates of the memory of a model's states: the same names, formulas and printed text.

The formulas are those of DeepSpeed 0.19.8 (estimate_zero2_model_states_mem_needs and estimate_zero3_...), with their
buffer factor of 1.5 for the host. They count no activations. :func:`gptpar.estimate_memory` predicts gptpar's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from gptpar.errors import GptparError, is_whole, wrong_type

HOST_FACTOR = 1.5


class Estimate(NamedTuple):
    """Bytes of a machine's memory and of one GPU's memory, with certain options."""

    host: int
    gpu: int
    options: str


def zero2(parameters: int, nodes: int, gpus: int, host_factor: float = HOST_FACTOR) -> Iterator[Estimate]:
    """DeepSpeed's rows for ZeRO-2.

    Args:
        parameters: of the model.
        nodes: machines.
        gpus: GPUs of a machine.
    """
    world = nodes * gpus
    yield Estimate(int(parameters * max(4 * world, 16) * host_factor), 2 * parameters, "offload_optimizer=cpu ")
    on_gpu = 2 * parameters + int(18 * parameters / world)
    yield Estimate(int(parameters * 4 * gpus * host_factor), on_gpu, "offload_optimizer=none")


def zero3(parameters: int, largest: int, nodes: int, gpus: int, host_factor: float = HOST_FACTOR) -> Iterator[Estimate]:
    """DeepSpeed's rows for ZeRO-3.

    Args:
        parameters: of the model.
        largest: parameters of the largest module, which are gathered at a time.
        nodes: machines.
        gpus: GPUs of a machine.
    """
    world = nodes * gpus
    for param, optimizer, states in (("cpu", "cpu", 0), ("none", "cpu", 2), ("none", "none", 18)):
        on_gpu = 4 * largest + int(states * parameters / world)
        for zero_init in (1, 0):
            whole_copies = parameters * 4 * gpus
            if optimizer == "none":
                host = float(largest * 4 * gpus if zero_init else whole_copies)
            else:
                kept = parameters * (18 if param == "cpu" else 16) / nodes
                host = kept if zero_init else max(whole_copies, kept)
            options = f"offload_param={param:<4}, offload_optimizer={optimizer:<4}, zero_init={zero_init}"
            yield Estimate(int(host * host_factor), on_gpu, options)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print DeepSpeed's ZeRO-2 estimates for a model."""
    _require_model(model)
    total, _ = sizes_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print DeepSpeed's ZeRO-2 estimates for a number of parameters."""
    total_params, num_gpus_per_node, num_nodes = _numbers(
        total_params=total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes
    )
    rows = zero2(total_params, num_nodes, num_gpus_per_node, additional_buffer_factor)
    _print(f"{_millions(total_params)} total params.", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print DeepSpeed's ZeRO-3 estimates for a model."""
    _require_model(model)
    sizes = sizes_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(*sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = HOST_FACTOR,
) -> None:
    """Print DeepSpeed's ZeRO-3 estimates for a number of parameters, and those of the largest module."""
    total_params, largest_layer_params, num_gpus_per_node, num_nodes = _numbers(
        total_params=total_params,
        largest_layer_params=largest_layer_params,
        num_gpus_per_node=num_gpus_per_node,
        num_nodes=num_nodes,
    )
    rows = zero3(total_params, largest_layer_params, num_nodes, num_gpus_per_node, additional_buffer_factor)
    size = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params."
    _print(size, num_gpus_per_node, num_nodes, rows)


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        needed = "a torch.nn.Module is needed; the estimate of a number of parameters is ..._all_cold"
        raise GptparError(wrong_type("model", model, needed))


def _numbers(**numbers: object) -> list[Any]:
    """The arguments as Python's numbers, which do not overflow. Parameters may be a product of floats."""
    values: list[Any] = []
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise GptparError(wrong_type(name, number, "a number is needed"))
        if float(number) < 1 and name.startswith("num_"):
            raise GptparError(f"{name} is {number}: it is at least 1.")
        values.append(int(number) if is_whole(number) else float(number))
    return values


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """(number of parameters, shared ones once; the largest number that a single module owns directly)"""
    largest = max((sum(p.numel() for p in one.parameters(recurse=False)) for one in model.modules()), default=0)
    storages = {_memory(p): p.numel() for p in model.parameters()}
    return sum(storages.values()), largest


def _memory(parameter: torch.Tensor) -> tuple[int, int]:
    """A key that parameters have in common if they share memory; on the meta device none do."""
    return (0, id(parameter)) if parameter.is_meta else (1, parameter.data_ptr())


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _print(size: str, gpus: int, nodes: int, rows: Iterator[Estimate]) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.")
    print(f"SW: Model with {size}")
    print("  per CPU  |  per GPU |   Options")
    for row in rows:
        print(f" {row.host / 2**30:7.2f}GB | {row.gpu / 2**30:6.2f}GB | {row.options}")
