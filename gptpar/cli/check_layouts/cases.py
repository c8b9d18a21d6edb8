"""Which combinations are tried. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gptpar.topology.layout import Layout


@dataclass(frozen=True)
class Case:
    """One way to run the same training.

    Attributes:
        name: for the table.
        layout: sizes of the axes.
        flags: what is added to the command line.
        whole_batch: whether the global batch is one micro-batch.
    """

    name: str
    layout: Layout
    flags: tuple[str, ...]
    whole_batch: bool = False


VARIANTS = {
    "": (),
    "full recompute": ("--recompute-granularity", "full"),
    "every 2": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2"),
    "selective": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp", "layernorm"),
    "CPU optimizer 0.6": ("--cpu-optimizer", "--cpu-optimizer-ratio", "0.6"),
    "all on the CPU": ("--cpu-optimizer", "--cpu-parameters"),
}


ONE_ADDEND = {
    "gradients on the host": ("--cpu-optimizer", "--offload-gradients", "on"),
    "parameters and gradients on the host": ("--cpu-optimizer", "--cpu-parameters", "--offload-gradients", "on"),
}
"""Only for one process, and with the whole batch at once: gradients that are no sums."""


def layouts(num_processes: int) -> Iterator[Layout]:
    """Every (data, tensor, pipeline) whose product is the number of processes."""
    for tensor in range(1, num_processes + 1):
        for pipeline in range(1, num_processes + 1):
            if num_processes % (tensor * pipeline) == 0:
                yield Layout(num_processes // (tensor * pipeline), tensor, pipeline)


def all_cases(num_processes: int) -> Iterator[Case]:
    """Every layout x ZeRO stage x token split x schedule x recomputation or offload."""
    if num_processes == 1:
        for name, flags in ONE_ADDEND.items():
            yield Case(name, Layout(), flags, whole_batch=True)
    for layout in layouts(num_processes):
        for zero in range(4 if layout.data > 1 else 1):
            for tokens_split in (False, True) if layout.tensor > 1 else (False,):
                for chunks in (1, 2) if layout.pipeline > 1 else (1,):
                    for variant, variant_flags in VARIANTS.items():
                        yield _case(layout, zero, tokens_split, chunks, variant, variant_flags)


def _case(
    layout: Layout, zero: int, tokens_split: bool, chunks: int, variant: str, variant_flags: tuple[str, ...]
) -> Case:
    words = [layout.describe(), f"ZeRO-{zero}" if layout.data > 1 else ""]
    words += ["sequence parallel" if tokens_split else "", "interleaved" if chunks > 1 else "", variant]
    flags = ["--tensor-model-parallel-size", str(layout.tensor)]
    flags += ["--pipeline-model-parallel-size", str(layout.pipeline), "--zero-stage", str(zero)]
    if tokens_split:
        flags.append("--sequence-parallel")
    if chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    return Case(", ".join(filter(None, words)), layout, (*flags, *variant_flags))


@dataclass(frozen=True)
class ModuleCase:
    """One way to train a user's module.

    Attributes:
        zero: section ``zero_optimization`` of its configuration.
    """

    name: str
    zero: Mapping[str, Any]


_CPU = {"device": "cpu"}
MODULE_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "CPU optimizer 0.6": {"offload_optimizer": {**_CPU, "ratio": 0.6}},
    "CPU optimizer": {"offload_optimizer": _CPU},
    "all on the CPU": {"offload_optimizer": _CPU, "offload_param": _CPU},
}


def module_cases(num_processes: int) -> Iterator[ModuleCase]:
    """Every ZeRO stage x offload of a user's module; ZeRO shares among several processes."""
    for stage in range(4 if num_processes > 1 else 1):
        for variant, zero in MODULE_VARIANTS.items():
            count = f"{num_processes} process{'es' * (num_processes > 1)}"
            words = [count, f"ZeRO-{stage}" if num_processes > 1 else "", variant]
            yield ModuleCase(", ".join(filter(None, words)), {"stage": stage, **zero})
