"""The keys that ``gptpar.initialize`` understands: DeepSpeed's, as the command line reads them, and our own. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from gptpar.config.deepspeed_keys import (
    KEYS,
    SCHEDULES,
    Absent,
    Elsewhere,
    NoEffect,
    Only,
    Rule,
    Sets,
    Tree,
    number,
    truth,
    whole,
    word_of,
)
from gptpar.config.deepspeed_values import optimizer_section, part_of, type_problems

OTHER_OPTIMIZER = "pass optimizer=torch.optim.AdamW(...) to gptpar.initialize"

Words: TypeAlias = "Mapping[str, str | Words]"


def tree_for(raw: Mapping[str, Any]) -> Tree:
    """The keys that ``raw`` may hold: those of the optimizer and the schedule follow from their types."""
    tree = dict(_MODULE_KEYS)
    if any(type_problems(raw, OTHER_OPTIMIZER)):
        tree["optimizer"] = Elsewhere()
    elif section := optimizer_section(raw):
        tree["optimizer"] = _reworded(section, _OPTIMIZER_WORDS)
    params = SCHEDULES.get(str(part_of(raw, "scheduler").get("type")))
    tree["scheduler"] = {
        "type": Sets(_schedule, ("scheduler.type",)),
        "params": Elsewhere() if params is None else {name: _SCHEDULE_PARAMS[name] for name in params},
    }
    return tree


def _reworded(tree: Tree, words: Words) -> Tree:
    """The same rules, some of them with a reason that means something to the author of a script."""
    changed: dict[str, Rule | Tree] = {}
    for name, why in words.items():
        rule = tree[name]
        if isinstance(rule, Mapping):
            assert not isinstance(why, str)
            changed[name] = _reworded(rule, why)
        else:
            assert isinstance(rule, Sets | NoEffect | Only) and isinstance(why, str)
            changed[name] = dataclasses.replace(rule, why=why)
    return {**tree, **changed}


def _schedule(value: Any) -> str:
    if not isinstance(value, str) or value not in SCHEDULES:
        raise ValueError(
            f"only {', '.join(SCHEDULES)} can be made from a configuration; pass gptpar.initialize an lr_scheduler, "
            "for example a function from the optimizer to one of torch.optim.lr_scheduler's"
        )
    return value


def _rates(value: Any) -> float | tuple[float, ...]:
    """A rate of all parameter groups, or one for each."""
    return tuple(map(number, value)) if isinstance(value, list) else number(value)


def _switch(value: Any) -> str:
    """On, off, or as the engine finds best (``auto``, which is read as if nothing were said)."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in ("on", "off"):
        raise ValueError('true, false or "auto" is needed')
    return str(value)


def _class_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError('a list of class names is needed, for example ["GPT2Block"]')
    return tuple(value)


def _partition(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("parameters, uniform, type:REGEX or boundaries such as 0,7,14 are needed")
    return "parameters" if value == "best" else value


_SCHEDULE_PARAMS: Mapping[str, Rule] = {
    **{
        name: Sets(_rates, (f"scheduler.{name}",), "the first two steps have it" if name == "warmup_min_lr" else "")
        for name in ("warmup_min_lr", "warmup_max_lr")
    },
    **{name: Sets(number, (f"scheduler.{name}",)) for name in ("warmup_min_ratio", "cos_min_ratio")},
    **{name: Sets(whole, (f"scheduler.{name}",)) for name in ("warmup_num_steps", "total_num_steps")},
    "warmup_type": Sets(word_of({"log": "log", "linear": "linear"}), ("scheduler.warmup_type",)),
}

_GPTPAR: Tree = {
    "compile": Sets(truth, ("module.compile",)),
    "units": Sets(_class_names, ("module.units",)),
    "step_graph": Sets(_switch, ("precision.cuda_graph",)),
    "speculation": Sets(_switch, ("offload.offload_speculation",)),
    "threads": Sets(whole, ("offload.cpu_optimizer_threads",)),
    "virtual_stages": Sets(whole, ("pipeline.virtual_stages",)),
    "seed": Sets(whole, ("data.seed",)),
}

_TIMES = "the engine measures nothing: time your loop"
_RECORDS = "the engine writes no records: log what it returns"
_RECOMPUTE = "recomputation is the module's own: it stays as it is"

_OPTIMIZER_WORDS: Words = {"params": {"weight_decay": "of every parameter whose group says no other"}}
_WORDS: Words = {
    "optimizer": _OPTIMIZER_WORDS,
    "zero_optimization": {
        "offload_optimizer": {"cpuadam_cores_perc": "see gptpar.threads", "super_offload": "see gptpar.speculation"},
        "ignore_unused_parameters": "a parameter without gradient in a step is updated with a gradient of zero",
    },
    "wall_clock_breakdown": _TIMES,
    "flops_profiler": _TIMES,
    "memory_breakdown": "see torch.cuda.memory_summary()",
    "dump_state": "the engine prints no configuration",
    "activation_checkpointing": _RECOMPUTE,
    "checkpoint": "checkpoints load into any ZeRO stage and number of processes",
    "compile": "see gptpar.compile",
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet"), _RECORDS),
}

_REWORDED = _reworded(KEYS, _WORDS)


def _with(section: str, **rules: Rule) -> Tree:
    inner = _REWORDED[section]
    assert isinstance(inner, Mapping)
    return {**inner, **rules}


_PIPELINE: Tree = {
    "stages": Sets(whole, ("pipeline.stages",)),
    "partition": Sets(_partition, ("pipeline.partition",)),
    "activation_checkpoint_interval": Sets(whole, ("pipeline.recompute",)),
    "seed_layers": NoEffect("each layer's initial values are drawn from a seed of its own"),
    "use_reentrant": NoEffect("activations are computed again without nested backward passes"),
    **dict.fromkeys(
        ("pipe_partitioned", "grad_partitioned"),
        NoEffect("activations go whole from stage to stage"),
    ),
}

_BF16 = _with("bf16", auto_cast=Sets(truth, ("module.bf16_auto_cast",)))

_MODULE_KEYS: Tree = {
    **_REWORDED,
    "fp16": _with("fp16", auto_cast=Sets(truth, ("module.fp16_auto_cast",))),
    "bf16": _BF16,
    "bfloat16": _BF16,
    "dataloader_drop_last": Only(
        (True,), "micro-batches have one size, so a rest that fills none is left out: drop it"
    ),
    "autotuning": Absent("DeepSpeed's autotuning"),
    "tensor_parallel": Absent("tensor parallelism of any module"),
    "pipeline": _PIPELINE,
    "gptpar": _GPTPAR,
}
