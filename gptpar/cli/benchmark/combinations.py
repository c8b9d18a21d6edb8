"""Which combinations a sweep runs, and why it does not run the others. Pure."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gptpar.cli.check_layouts.cases import layouts
from gptpar.config import Config
from gptpar.config.derive import derive
from gptpar.config.flags import ParsedFlags, flag_name
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.topology.layout import Layout

TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
SEQUENCE_PARALLEL = "parallel.sequence_parallel"
SWEPT = {
    "sweep_layouts": (TENSOR, PIPELINE),
    "sweep_micro_batches": ("batch.micro_batch_size",),
    "sweep_recompute": ("recompute.recompute_granularity",),
    "sweep_zero": ("parallel.zero_stage",),
    "sweep_virtual_stages": ("parallel.num_virtual_stages_per_pipeline_rank",),
    "sweep_cpu_ratios": ("offload.cpu_optimizer_ratio",),
}
"""What each of a sweep's flags chooses, and nobody may choose beside it."""
LABELS = {
    "layout": "{}",
    "micro-batch": "micro-batch {}",
    "recompute": "recompute {}",
    "ZeRO": "ZeRO-{}",
    "virtual": "{} virtual",
    "CPU ratio": "CPU ratio {}",
}
"""How each column of the table is written in a sentence."""

Changes = dict[str, Any]
"""``section.field`` -> value, over what the command line says."""


@dataclass(frozen=True)
class Combination:
    """One choice of everything that is swept.

    Attributes:
        changes: over the command line.
        config: with the changes and what follows from them.
        refusal: why it is not started; empty if it is.
    """

    layout: Layout
    changes: Mapping[str, Any]
    config: Config
    refusal: str = ""

    @cached_property
    def cells(self) -> dict[str, str]:
        """Its place in the table, by the names of the columns."""
        config = self.config
        return {
            "layout": self.layout.describe(),
            "micro-batch": str(config.batch.micro_batch_size),
            "recompute": config.recompute.recompute_granularity or "none",
            "ZeRO": str(config.parallel.zero_stage),
            "virtual": str(config.parallel.num_chunks),
            "CPU ratio": config.offload.cpu_optimizer_ratio if config.offload.cpu_optimizer else "0",
        }

    def describe(self, names: list[str]) -> str:
        """Some of the cells in one line."""
        return ", ".join(LABELS[name].format(self.cells[name]) for name in names)

    @property
    def flags(self) -> list[str]:
        """The changes as words of a command line."""
        words: list[str] = []
        for name, value in self.changes.items():
            if value is not False:
                words += [flag_name(name.split(".")[1])] + ([] if value is True else [str(value)])
        return words


def layout_sizes(text: str) -> dict[str, int]:
    """An argparse type: ``dp2tp2``, ``tp2pp2``, ``dp4``; axes that are not named have one process, or the rest."""
    if not re.fullmatch(r"((dp|tp|pp)[1-9]\d*x?)+", text):
        raise argparse.ArgumentTypeError(f"{text} is not a layout such as dp4, tp2pp2 or dp2xtp2")
    return {axis: int(size) for axis, size in re.findall(r"(dp|tp|pp)(\d+)", text)}


def cpu_ratio(text: str) -> str:
    """An argparse type: a share from 0 to 1, or ``auto``."""
    if text != "auto" and not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return text


def contradictions(parsed: ParsedFlags) -> Iterator[str]:
    """Flags that a sweep cannot have beside its own."""
    given = {name for name in SWEPT if getattr(parsed.rest, name) is not None}
    for sweep, fields in SWEPT.items():
        for name in fields:
            if sweep in given and name in parsed.given:
                yield f"{flag_name(sweep)} chooses {flag_name(name.split('.')[1])}, which is given as well: keep one."
    for name in ("save", "load", "wandb_project"):
        if parsed.given & {f"checkpoint.{name}", f"logging.{name}"}:
            yield f"{flag_name(name)} is for one run: leave it out with --sweep."
    if parsed.rest.breakdown or parsed.rest.trace is not None:
        yield "--breakdown and --trace are for one run: leave them out with --sweep."


def combinations(parsed: ParsedFlags, count: int) -> list[Combination]:
    """All combinations on a number of processes, in the order in which they are to run; refused ones too.

    Where the command line has no global batch, all get the smallest that each of them can cut into micro-batches.
    """
    options = parsed.rest
    found = list(_layouts(parsed, count))
    micro_batches = options.sweep_micro_batches or [parsed.config.batch.micro_batch_size]
    common: Changes = {}
    if parsed.config.batch.global_batch_size is None and None not in micro_batches:
        data = [layout.data for layout in found if layout.world_size == count]
        common["batch.global_batch_size"] = math.lcm(*(size * d for size in micro_batches for d in data))
    rest = [
        _choices("batch.micro_batch_size", options.sweep_micro_batches),
        _choices("recompute.recompute_granularity", options.sweep_recompute, unset="none"),
        _choices("parallel.zero_stage", options.sweep_zero),
        _choices("parallel.num_virtual_stages_per_pipeline_rank", options.sweep_virtual_stages, unset=1),
        [_offload(ratio, parsed) for ratio in options.sweep_cpu_ratios or [None]],
    ]
    return [
        _combination(parsed, count, layout, {**common, **_axes(layout, parsed), **_merged(choice)})
        for layout in found
        for choice in itertools.product(*rest)
    ]


def _merged(parts: tuple[Changes, ...]) -> Changes:
    return {name: value for part in parts for name, value in part.items()}


def _choices(name: str, values: list[Any] | None, unset: Any = None) -> list[Changes]:
    """A change for each value; none where nothing is swept, or for the value that means that nothing is set."""
    return [{} if value == unset else {name: value} for value in dict.fromkeys(values or [unset])]


def _offload(ratio: str | None, parsed: ParsedFlags) -> Changes:
    """0 is without the CPU optimizer, unless the command line says that it is used."""
    if ratio is None or (ratio != "auto" and float(ratio) == 0 and not parsed.config.offload.cpu_optimizer):
        return {}
    return {"offload.cpu_optimizer": True, "offload.cpu_optimizer_ratio": ratio}


def _layouts(parsed: ParsedFlags, count: int) -> Iterator[Layout]:
    wished = parsed.rest.sweep_layouts
    if wished is None:
        parallel = parsed.config.parallel
        for layout in layouts(count):
            tensor_fits = TENSOR not in parsed.given or layout.tensor == parallel.tensor_model_parallel_size
            pipeline_fits = PIPELINE not in parsed.given or layout.pipeline == parallel.pipeline_model_parallel_size
            if tensor_fits and pipeline_fits:
                yield layout
        return
    for sizes in wished:
        tensor, pipeline = sizes.get("tp", 1), sizes.get("pp", 1)
        yield Layout(sizes.get("dp", max(1, count // (tensor * pipeline))), tensor, pipeline)


def _axes(layout: Layout, parsed: ParsedFlags) -> Changes:
    """The layout's sizes; tokens are split in all layouts that have a tensor axis, or in none."""
    changes: Changes = {TENSOR: layout.tensor, PIPELINE: layout.pipeline}
    if parsed.config.parallel.sequence_parallel:
        changes[SEQUENCE_PARALLEL] = layout.tensor > 1
    return changes


def _combination(parsed: ParsedFlags, count: int, layout: Layout, changes: Changes) -> Combination:
    config = parsed.config
    for name, value in changes.items():
        section, field = name.split(".")
        config = config.update(section, **{field: value})
    derived = derive(config, count)[0]
    refusal = _refusal(parsed, count, layout, derived)
    if not refusal:
        try:
            resolve(dataclasses.replace(parsed, config=config), count)
        except ConfigError as error:
            refusal = " ".join(error.problems)
    return Combination(layout, changes, derived, refusal)


def _refusal(parsed: ParsedFlags, count: int, layout: Layout, config: Config) -> str:
    """What validation cannot see."""
    if layout.world_size != count and count % (layout.tensor * layout.pipeline) == 0:
        return f"{layout.describe()} is {layout.world_size} processes, and here are {count}."
    stages = parsed.rest.sweep_zero
    if stages and layout.data == 1 and config.parallel.zero_stage != stages[0]:
        return f"without data parallelism ZeRO-{config.parallel.zero_stage} is the same as ZeRO-{stages[0]}."
    return ""
