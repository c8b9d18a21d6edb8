"""Every flag: declared once, read by something, and no value of it ends in a traceback."""

import ast
import dataclasses
from pathlib import Path

import pytest

import gptpar
from gptpar.config import Flags, flag_fields
from gptpar.config.fields import flag_name
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import GptparError
from gptpar.optim.optimizers import OPTIMIZERS
from tests.helpers import TINY


def test_every_field_that_is_a_flag_has_a_place_in_the_help() -> None:
    """A flag that stands for others is before an open field, or behind all of them."""
    sections = {spec.name: type(getattr(Flags(), spec.name)) for spec in dataclasses.fields(Flags)}
    fields = [f"{name}.{s.name}" for name, kind in sections.items() for s in dataclasses.fields(kind) if s.metadata]
    places = [one.key for one in flag_fields()]
    assert sorted(places) == sorted(fields)
    groups = places.index("model.group_query_attention")
    assert places[groups + 1] == "model.num_query_groups" and places[0] == "model.preset"


PACKAGE = Path(gptpar.__file__).parent
FIELDS = [
    (section.name, spec)
    for section in dataclasses.fields(Flags)
    for spec in dataclasses.fields(type(getattr(Flags(), section.name)))
    if spec.metadata
]

PIPELINE = "--pipeline-model-parallel-size 2"
# Flags that only say other fields, or how the command line is read: each with words under which that shows.
SAID_BY_OTHERS = {
    "train_tokens": "--train-iters 20 --train-tokens 640",
    "gradient_accumulation_steps": "--gradient-accumulation-steps 3",
    "step_batch_size_schedule": "--step-batch-size-schedule 0:8",
    "squared_relu": "--squared-relu",
    "quick_geglu": "--quick-geglu",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "glu_activation": "--glu-activation swiglu",
    "use_rotary_position_embeddings": "--use-rotary-position-embeddings",
    "add_position_embedding": "--no-position-embedding",
    "use_rope_scaling": "--position-embedding-type rope --use-rope-scaling",
    "no_rope_freq": "--position-embedding-type rope --no-rope-freq 2",
    "window_attn_skip_freq": "--window-size 4 --window-attn-skip-freq 2",
    "group_query_attention": "--num-query-groups 2",
    "num_layers_per_virtual_pipeline_stage": f"{PIPELINE} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    "no_pipeline_parallel": "--no-pipeline-parallel",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "data_parallel_sharding_strategy": "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
    "recompute_activations": "--recompute-activations",
    "checkpoint_activations": "--checkpoint-activations",
    "activations_checkpoint_method": "--activations-checkpoint-method block",
    "checkpoint_num_layers": "--checkpoint-activations --checkpoint-num-layers 2",
}
# Nothing more can be said with these: one choice, the shape's name, and files whose contents are the flags.
NOTHING_ELSE = {"optimizer", "deepspeed", "deepspeed_config", "data_args_path", "per_split_data_args_path"}


# What fills, checks or translates flags, or foresees a run: being read here alone is being ignored by the run.
NO_READERS = ("config/deepspeed", "config/flags.py", "plan/", "sweep/", "fit.py")


def _yields(node: ast.stmt) -> bool:
    """Whether it is a function that yields problems of the flags, or derives flags from flags."""
    inside = list(ast.walk(node)) if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(n, ast.Yield | ast.YieldFrom) or getattr(n, "arg", "") == "notes" for n in inside)


def names_read() -> set[str]:
    """Attributes that the package reads, words in the sections' properties, for ``getattr``, and optimizers'."""
    found = {flag for optimizer in OPTIMIZERS.values() for flag in optimizer.flags}
    for path in PACKAGE.rglob("*.py"):
        place = str(path.relative_to(PACKAGE))
        if place.startswith(NO_READERS):
            continue
        tree = ast.parse(path.read_text())
        if place.startswith("config/sections/"):
            tree.body = [node for node in tree.body if not _yields(node)]
        found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        if place.startswith("config/"):
            functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
            words = (n for function in functions for n in ast.walk(function) if isinstance(n, ast.Constant))
            found |= {word.value for word in words if isinstance(word.value, str)}
    return found


def resolved(words: str, world_size: int = 4) -> dict[str, object]:
    config = resolve(parse_flags([*TINY.split(), *words.split()]), world_size)[0]
    return {
        f"{s.name}.{f.name}": getattr(getattr(config, s.name), f.name)
        for s in dataclasses.fields(config)
        for f in dataclasses.fields(getattr(config, s.name))
    }


@pytest.mark.slow
def test_every_flag_has_a_reader() -> None:
    """In what the run is made of; or it says another field, which has one."""
    unread = {spec.name for _, spec in FIELDS} - {*names_read(), *NOTHING_ELSE, *SAID_BY_OTHERS}
    assert not unread, f"{', '.join(map(flag_name, sorted(unread)))}: read by nobody"
    for section, name in ((section, spec.name) for section, spec in FIELDS if spec.name in SAID_BY_OTHERS):
        words = SAID_BY_OTHERS[name]
        before, after = resolved(words.rsplit("--", 1)[0]), resolved(words)
        changed = {key for key in after if after[key] != before[key]} - {f"{section}.{name}"}
        assert changed, f"{words} changes nothing"


NUMBERS = [spec for _, spec in FIELDS if "int" in str(spec.type) or "float" in str(spec.type)]
HOSTILE = {"int": ("-1", "0", "1e15", "9223372036854775808", "9" * 400), "float": ("-1", "0", "1e-320", "1e15")}
MORE = "--fp16 --position-embedding-type rope --swiglu --cpu-optimizer --use-distributed-optimizer"


def words_for(spec: dataclasses.Field[object], value: str) -> list[str]:
    return [flag_name(spec.name), *[value] * (3 if spec.name == "rampup_batch_size" else 1)]


@pytest.mark.parametrize("value", ["nan", "\u00b2", "1e400"])
def test_what_is_no_number_is_told_for_each_flag(value: str) -> None:
    told = parse_flags([word for spec in NUMBERS for word in words_for(spec, value)]).problems
    assert all(any(one.startswith(f"{flag_name(spec.name)} {value}") for one in told) for spec in NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_no_number_ends_in_a_traceback(spec: dataclasses.Field[object]) -> None:
    """Each is a problem told in sentences, which name the flag, or a configuration that can run."""
    kind = "int" if "int" in str(spec.type) else "float"
    for start, values in ((TINY, HOSTILE[kind]), (f"{TINY} {MORE}", ("0", "1e18"))):
        for value in values:
            try:
                resolve(parse_flags([*start.split(), *words_for(spec, value)]), 1)
            except GptparError as error:
                assert all(len(line) < 600 for line in str(error).splitlines())
