"""Bytes of gradients and optimizer state that a parameter table asks for. Pure."""

from __future__ import annotations

from gptpar.engine.ranges import Home
from gptpar.engine.table import ParameterTable


def gradient_bytes(table: ParameterTable, size: int, zero_stage: int, micro_batches: int) -> int:
    """Gradients that a process keeps on its device from one unit's backward pass to the step.

    Under ZeRO-1 a reduced shard lies beside the sum it comes from. Sums over micro-batches of what the CPU updates, in
    whole units or in a part of one, are there until the last backward pass.

    Args:
        size: bytes of an element, as the device's optimizer reads it; sums have the same.
    """
    whole = [unit for unit in table.units if table.on_device[unit.name] == unit.shard_length]
    elements = table.length(Home.DEVICE)
    if zero_stage == 1:
        elements += sum(unit.length for unit in whole)
    if micro_batches > 1:
        divided = [unit for unit in table.units if table.on_device[unit.name] < unit.shard_length]
        elements += sum(unit.length if zero_stage < 2 else unit.shard_length for unit in divided)
    return size * elements
