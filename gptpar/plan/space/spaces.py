"""The three spaces: what a search predicts, what a sweep measures, what check-layouts proves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from gptpar.config import Flags
from gptpar.config.sections.model import expand_preset
from gptpar.errors import ConfigError
from gptpar.plan.space import dimensions as d
from gptpar.plan.space.candidate import UNCHANGED, Candidate, Changes, Option, product
from gptpar.topology.mesh import Mesh

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 4)
MAX_STAGES = 64
"""Sizes of a micro-batch, numbers of a rank's virtual stages, and most stages that a search tries."""
MIN_CONTEXT_TOKENS = 2048
"""The fewest tokens of a sample that a search gives a context rank; fewer are left to the data axis."""
ONE_GPU_TOKENS = 1 << 18
"""Tokens of a step that a search on one GPU begins with where the command line says no batch."""
MAX_VIRTUAL_STAGES = 48
"""Limit of an interleaved pipeline's virtual stages in a search; balancing more would take a second for each layout."""


def to_predict(
    flags: Flags, given: Set[str], num_processes: int, gpus_per_node: int, common: Option = UNCHANGED
) -> Iterator[Candidate]:
    """All layouts that a search judges; fields that were typed stay as they are.

    Args:
        flags: the command line.
        given: the fields that were typed, as ``section.field``.
        num_processes: number of GPUs.
        gpus_per_node: the largest size of the tensor axis.
        common: changes of all layouts, one of :func:`rounds`.
    """
    parallel, model = flags.parallel, expand_preset(flags, given)[0].model
    typed_tensor, typed_pipeline = d.TENSOR in given, d.PIPELINE in given
    within_a_node = [1 << i for i in range(min(gpus_per_node, num_processes).bit_length())]
    found = d.layouts(
        num_processes,
        [parallel.tensor_model_parallel_size] if typed_tensor else within_a_node,
        lambda rest: [parallel.pipeline_model_parallel_size] if typed_pipeline else d.divisors(rest, MAX_STAGES),
        lambda rest: [parallel.context_parallel_size] if d.CONTEXT in given else _contexts(model.seq_length, rest),
    )
    recomputed = _recomputed(model.num_layers or 0) if num_processes == 1 else (UNCHANGED, _FULL)
    found = _with_experts(found, flags, given)
    searched = [
        d.Choices(d.TENSOR, lambda at: [at.tensor], "tp{}"),
        d.Choices(d.PIPELINE, lambda at: [at.pipeline], "pp{}"),
        d.Choices(d.CONTEXT, lambda at: [at.context if at.context > 1 else None], "cp{}"),
        d.Choices(
            d.VIRTUAL_STAGES, lambda at: d.virtual_stages(at, VIRTUAL_STAGES, MAX_VIRTUAL_STAGES), "virtual stages {}"
        ),
        d.Choices(d.EXPERT, lambda at: [at.expert if at.expert > 1 else None], "ep{}"),
        d.Choices(d.ZERO_STAGE, d.zero_stages, "ZeRO-{}"),
        d.Choices(d.SEQUENCE_PARALLEL, lambda at: [at.tensor > 1]),
        d.Choices(d.PARTITION, lambda at: ["flops" if at.pipeline > 1 else None]),
        d.Choices(d.MICRO_BATCH, lambda at: MICRO_BATCH_SIZES, "micro-batch {}"),
    ]
    if any(name.startswith("recompute.") for name in given):
        recomputed = (UNCHANGED,)
    open_ones = [one for one in searched if _is_open(one.field, given)]
    return product(found, [*open_ones, d.fixed(*recomputed), d.fixed(common)])


def _contexts(seq_length: int | None, rest: int) -> list[int]:
    """Sizes of the context axis for the samples' length: powers of two that leave every rank enough tokens."""
    most = min(rest, (seq_length or 0) // MIN_CONTEXT_TOKENS)
    return [1 << i for i in range(max(1, most).bit_length()) if rest % (1 << i) == 0]


def _selective(*modules: str) -> Option:
    return Option({d.RECOMPUTE: "selective", d.RECOMPUTE_MODULES: modules}, f"recompute {' '.join(modules)}")


_FULL = Option({d.RECOMPUTE: "full"}, "recompute full")
_ACTIVATION_AGAIN, _MLP_AGAIN = _selective("layernorm", "mlp_act"), _selective("layernorm", "mlp")


def _recomputed(num_layers: int) -> tuple[Option, ...]:
    """The ways of recomputation that a search on one GPU tries, the cheapest first; the host may keep the rest."""
    some = [count for count in dict.fromkeys(-(-num_layers * i // 4) for i in (1, 2, 3, 4)) if count]
    return (
        UNCHANGED,
        _ACTIVATION_AGAIN,
        _MLP_AGAIN,
        *(
            Option({**_MLP_AGAIN.changes, d.OFFLOADED_LAYERS: count}, f"{_MLP_AGAIN.name}, {count} blocks on the host")
            for count in some
        ),
        _FULL,
        Option({**_FULL.changes, "recompute.checkpoint_in_cpu": True}, "recompute full, inputs on the host"),
    )


def _with_experts(meshes: Iterable[Mesh], flags: Flags, given: Collection[str]) -> Iterator[Mesh]:
    """The layouts with each size of the expert axis, unless it was typed."""
    num_experts = 1 if d.EXPERT in given else expand_preset(flags, set(given))[0].model.num_experts
    return d.with_expert_axes(meshes, num_experts)


def _is_open(field: str, given: Collection[str]) -> bool:
    """Whether the command line leaves a field to the search."""
    return field not in given and not (field == d.VIRTUAL_STAGES and d.LAYERS_PER_VIRTUAL_STAGE in given)


def offloads(given: Collection[str]) -> list[Option]:
    """Options that move something to host memory, the fastest first; fields that were typed stay as they are.

    The optimizer's gradients follow it; ``--offload-gradients auto`` decides when.
    """
    found, changes, words = [UNCHANGED], dict[str, Any](), list[str]()
    for more, word in ((d.ON_CPU, "--cpu-optimizer"), (d.PARAMETERS_ON_CPU, "--cpu-parameters")):
        new = {name: value for name, value in more.items() if name not in given}
        changes = {**changes, **new}
        words += [word] if True in new.values() else []
        if new:
            found.append(Option(changes, ", ".join(words)))
    return found


def rounds(flags: Flags, given: Set[str], num_processes: int) -> list[list[Option]]:
    """The changes that a search tries in all layouts, round by round; a round that finds something is the last.

    Several GPUs get more and more in host memory. One GPU may be faster with a larger micro-batch and more in host
    memory, and all that is tried at once. If its command line has no batch, a step has ``ONE_GPU_TOKENS``; in a second
    round it is one micro-batch, whose gradients need no sum.
    """
    moved = offloads(given)
    if num_processes > 1:
        return [[one] for one in moved]
    batch, length = flags.batch, expand_preset(flags, given)[0].model.seq_length
    if batch.global_batch_size or batch.step_batch_size_schedule or not length:
        return [moved]
    large = {d.GLOBAL_BATCH: samples_of(ONE_GPU_TOKENS, length)}
    return [[Option({**one.changes, **large}, one.name) for one in moved], moved]


def samples_of(tokens: int, length: int) -> int:
    """Samples of ``length`` tokens for a step of ``tokens``.

    They are a multiple of 32, 16 or 8, which many micro-batches divide: the first that is at most a tenth away.
    """
    samples = max(1, tokens // length)
    near = (unit * round(samples / unit) for unit in (32, 16, 8))
    return next((found for found in near if 10 * abs(found - samples) <= samples), samples)


@dataclass(frozen=True)
class SweepValues:
    """The values that a user lists for a sweep; ``None``: that of the command line.

    Attributes:
        layouts: sizes of axes by ``dp``, ``tp``, ``pp``, ``cp`` and ``ep``; ``None``: all that the command line allows.
        micro_batches: sizes of a micro-batch, in samples.
        recompute: ``none``, ``selective`` or ``full``.
        zero: ZeRO stages.
        virtual_stages: numbers for each pipeline rank.
        cpu_ratios: ratios of the CPU optimizer, or ``auto``; 0 is without it, unless the command line has it.
    """

    layouts: Sequence[Mapping[str, int]] | None = None
    micro_batches: Sequence[int] | None = None
    recompute: Sequence[str] | None = None
    zero: Sequence[int] | None = None
    virtual_stages: Sequence[int] | None = None
    cpu_ratios: Sequence[float | str] | None = None


CHOSEN = {
    "layouts": (d.TENSOR, d.PIPELINE, d.CONTEXT, d.EXPERT),
    "micro_batches": (d.MICRO_BATCH,),
    "recompute": (d.RECOMPUTE,),
    "zero": (d.ZERO_STAGE,),
    "virtual_stages": (d.VIRTUAL_STAGES,),
    "cpu_ratios": (d.CPU_RATIO,),
}
"""List of a sweep -> the fields of a configuration that it sets."""


def to_measure(flags: Flags, given: Collection[str], num_processes: int, values: SweepValues) -> Iterator[Candidate]:
    """Every combination of the listed values, in the order in which they are to run; impossible ones are included.

    If the command line has no global batch size, all get the smallest one that each can divide into micro-batches.
    """
    found = _layouts_to_measure(flags, given, num_processes, values.layouts)
    micro_batches = values.micro_batches or [flags.batch.micro_batch_size or 0]
    common: Changes = {}
    if flags.batch.global_batch_size is None and all(micro_batches):
        data = [mesh.data for mesh in found if mesh.world_size == num_processes]
        common = {d.GLOBAL_BATCH: math.lcm(*(size * ranks for size in micro_batches for ranks in data))}
    tokens_split = flags.parallel.sequence_parallel  # in all layouts that have a tensor axis, or in none
    return product(
        found,
        [
            d.fixed(Option(common)),
            d.sizes,
            d.Choices(d.SEQUENCE_PARALLEL, lambda at: [at.tensor > 1 if tokens_split else None]),
            d.listed(d.MICRO_BATCH, values.micro_batches),
            d.listed(d.RECOMPUTE, values.recompute, unset="none"),
            d.listed(d.ZERO_STAGE, values.zero),
            d.listed(d.VIRTUAL_STAGES, values.virtual_stages, unset=1),
            d.fixed(*(_cpu_ratio(ratio, flags.offload.cpu_optimizer) for ratio in values.cpu_ratios or (None,))),
        ],
    )


def _layouts_to_measure(
    flags: Flags, given: Collection[str], num_processes: int, listed: Sequence[Mapping[str, int]] | None
) -> list[Mesh]:
    if listed is None:
        typed = flags.parallel
        found = d.layouts(num_processes, contexts=lambda rest: [typed.context_parallel_size])
        return [
            mesh
            for mesh in _with_experts(found, flags, given)
            if d.TENSOR not in given or mesh.tensor == typed.tensor_model_parallel_size
            if d.PIPELINE not in given or mesh.pipeline == typed.pipeline_model_parallel_size
        ]
    return _named_layouts(num_processes, listed)


def _named_layouts(num_processes: int, listed: Sequence[Mapping[str, int]]) -> list[Mesh]:
    """The layouts that a user lists by the sizes of their axes.

    Raises:
        ConfigError: the expert axis does not divide the processes with other tokens.
    """
    others = [[sizes.get(axis, 1) for axis in ("tp", "pp", "cp")] for sizes in listed]
    rest = [d.sized(num_processes, *sizes) for sizes in others]
    meshes = [replace(at, data=sizes.get("dp", at.data)) for sizes, at in zip(listed, rest, strict=True)]
    experts = [sizes.get("ep", 1) for sizes in listed]
    problems = [
        f"a layout has ep{size}, which does not divide dp{at.data} x cp{at.context}: choose a size that does."
        for size, at in zip(experts, meshes, strict=True)
        if at.data * at.context % size
    ]
    if problems:
        raise ConfigError(problems)
    return [replace(at, expert=size) for size, at in zip(experts, meshes, strict=True)]


def _cpu_ratio(ratio: float | str | None, has_cpu_optimizer: bool) -> Option:
    if ratio is None or (ratio == 0 and not has_cpu_optimizer):
        return UNCHANGED
    return Option({d.CPU_OPTIMIZER: True, d.CPU_RATIO: ratio})


VARIANTS = (
    UNCHANGED,
    Option({d.RECOMPUTE: "full"}, "full recompute"),
    Option(
        {d.RECOMPUTE: "full", "recompute.recompute_method": "uniform", "recompute.recompute_num_layers": 2}, "every 2"
    ),
    Option({d.RECOMPUTE: "selective", d.RECOMPUTE_MODULES: ("core_attn", "mlp", "layernorm")}, "selective"),
    Option({d.RECOMPUTE: "selective", d.RECOMPUTE_MODULES: ("mlp_act", "layernorm")}, "norms, activation"),
    Option({"recompute.mlp_chunks_for_training": 3}, "MLP in tiles"),
    Option({**_MLP_AGAIN.changes, d.OFFLOADED_LAYERS: 4}, "saved tensors on the host"),
    *(Option({d.CPU_OPTIMIZER: True, d.CPU_RATIO: r}, f"CPU optimizer {r}") for r in (0.05, 0.6, 0.95)),
    Option({d.CPU_OPTIMIZER: True, d.CPU_PARAMETERS: True}, "all on the CPU"),
    Option({d.CPU_OPTIMIZER: True, d.CPU_RATIO: 0.6, **d.HALF_OF_THE_SUMS}, "some gradient sums on the host"),
    Option({d.CPU_OPTIMIZER: True, d.CPU_RATIO: 0.6, d.FUSED_SUMS: True}, "products add to gradient sums"),
)
"""Variants of recomputation and offload that are proved in every layout."""

GRADIENTS_LEAVE = (
    Option({d.CPU_OPTIMIZER: True, d.OFFLOAD_GRADIENTS: "on"}, "gradients on the host"),
    Option(
        {d.CPU_OPTIMIZER: True, d.CPU_PARAMETERS: True, d.OFFLOAD_GRADIENTS: "on"},
        "parameters and gradients on the host",
    ),
)
"""Options whose gradients are no sums; they need one process whose micro-batch is the whole batch."""


def to_prove(flags: Flags, num_processes: int) -> Iterator[Candidate]:
    """Every layout x ZeRO stage x token split x schedule x recomputation or offload."""
    # Another micro-batch size has other dropout masks, and other balancing losses, one for each micro-batch.
    if num_processes == 1 and not flags.model.has_dropout and not flags.model.balances_micro_batches:
        whole_batch = {d.MICRO_BATCH: flags.batch.global_batch_size or flags.batch.micro_batch_size}
        for option in GRADIENTS_LEAVE:
            yield Candidate({**option.changes, **whole_batch}, option.name)
    yield from product(
        d.with_expert_axes(d.layouts(num_processes, contexts=d.divisors), flags.model.num_experts),
        [
            d.sizes,
            lambda at: [Option({d.CONTEXT_WAY: way}, way) for way in d.WAYS] if at.context > 1 else [UNCHANGED],
            lambda at: [
                Option({d.ZERO_STAGE: n}, f"ZeRO-{n}" if len(d.zero_stages(at)) > 1 else "") for n in d.zero_stages(at)
            ],
            lambda at: [UNCHANGED, *[Option({d.SEQUENCE_PARALLEL: True}, "sequence parallel")] * (at.tensor > 1)],
            lambda at: [UNCHANGED, *[Option({d.VIRTUAL_STAGES: 2}, "interleaved")] * (at.pipeline > 1)],
            d.fixed(*VARIANTS),
        ],
    )


_CPU = {"device": "cpu"}
MODULE_VARIANTS = (
    UNCHANGED,
    Option({"offload_optimizer": {**_CPU, "ratio": 0.6}}, "CPU optimizer 0.6"),
    Option({"offload_optimizer": _CPU}, "CPU optimizer"),
    Option({"offload_optimizer": _CPU, "offload_param": _CPU}, "all on the CPU"),
)


def to_prove_of_a_module(num_processes: int) -> Iterator[Option]:
    """Every ZeRO stage x offload of a user's module, as section ``zero_optimization`` of its configuration."""
    several = num_processes > 1
    for stage in d.zero_stages(Mesh(data=num_processes)):
        for variant in MODULE_VARIANTS:
            words = [f"{num_processes} process{'es' * several}", f"ZeRO-{stage}" if several else "", variant.name]
            yield Option({"stage": stage, **variant.changes}, ", ".join(filter(None, words)))
