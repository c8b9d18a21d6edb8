"""Counts the bytes of gradients and of optimizer state that follow from a parameter table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gptpar.engine.ranges import Home
from gptpar.engine.table import ParameterTable
from gptpar.optim.group_ranges import GroupRange
from gptpar.optim.state_layout import StateLayout
from gptpar.optim.update import Update


def gradient_bytes(
    table: ParameterTable, size: int, zero_stage: int, micro_batches: int, *, host_sums: float = 0.0
) -> int:
    """Bytes of gradients that a process keeps on its device from a unit's backward pass to the step.

    Under ZeRO-1 it keeps a reduced shard beside the sum from which the shard comes. Of units with elements that the CPU
    updates, it keeps the sums over micro-batches until the last backward pass.

    Args:
        table: the process's parameters.
        size: bytes of an element of a gradient that the device's optimizer reads; sums have the same size.
        zero_stage: 0 to 3.
        micro_batches: number of micro-batches of a step.
        host_sums: the share of units whose sums over micro-batches are on the host.
    """
    if host_sums and zero_stage == 1:  # each micro-batch's gradient is reduced to shards
        zero_stage = 2
    whole = [unit for unit in table.units if table.on_device[unit.name] == unit.shard_length]
    elements = table.length(Home.DEVICE)
    if zero_stage == 1:
        elements += sum(unit.length for unit in whole)
    if micro_batches > 1:
        divided = [unit for unit in table.units if table.on_device[unit.name] < unit.shard_length]
        divided = [unit for unit in divided if unit.name not in table.summed_on_host(host_sums)]
        elements += sum(unit.length if zero_stage < 2 else unit.shard_length for unit in divided)
    return size * elements


def state_bytes(group_ranges: Sequence[GroupRange], updates: Sequence[Update], length: int, size: int) -> int:
    """Bytes of a flat vector's master weights and optimizer states.

    Args:
        updates: each optimizer group's update.
        length: number of the vector's elements.
        size: bytes of a number that is not rounded.
    """
    return size * length + StateLayout(group_ranges, updates, length).num_bytes(size)
