"""What a DeepSpeed configuration says, and what DeepSpeed assumes where it says nothing.

One reading for two askers: the command line fills what its flags leave open, and ``gptpar.initialize`` reads nothing
else. Each brings the tree of the keys that it understands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_keys import DEFAULTS_SINCE, OPTIMIZER_SECTIONS, SCHEDULE_DEFAULTS, Tree
from gptpar.config.deepspeed_reader import KeyReader, Said
from gptpar.config.jsonc import JsonError, read_object


def read_file(path: str | Path) -> dict[str, Any]:
    """Parse a configuration.

    Raises:
        ValueError: it cannot be; the message is the part of a sentence behind the file's name.
    """
    try:
        return read_object(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}): name a file.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: save it as text.") from None
    except JsonError as error:
        raise ValueError(f"{error}; correct it.") from None


def read_values(raw: Mapping[str, Any], tree: Tree, flags: Flags, *, micro_is_known: bool) -> KeyReader:
    """What the file says by the keys of ``tree``, and what DeepSpeed assumes; what depends on nothing is left out.

    Args:
        raw: the parsed file.
        flags: what is said elsewhere, which may turn on what the file's keys are about.
        micro_is_known: whether it says the micro-batch size.
    """
    reader, defaults = KeyReader(tree), KeyReader(tree, default=True)
    plain = without_auto(raw)
    reader.walk(raw)
    defaults.walk(_absent(_defaults(plain, micro_is_known), plain))
    reader.problems += defaults.problems
    reader.said += defaults.said
    _leave_out_unused(reader, flags)
    return reader


def one_each(said: list[Said]) -> tuple[list[Said], list[str]]:
    """(a value for each field, a sentence for each contradiction); what the file says goes before what is assumed."""
    chosen: dict[str, Said] = {}
    problems = []
    for one in sorted(said, key=lambda one: one.default):
        before = chosen.setdefault(one.field, one)
        if not one.default and before.value != one.value:
            problems.append(f"{before}, but {one}: keep one.")
    return list(chosen.values()), problems


def reason_of(said: Said) -> str:
    """Where a value comes from: its key, and what a reader of the banner should know."""
    default = f"absent, so DeepSpeed's default{DEFAULTS_SINCE.get(said.key, '')}"
    return "; ".join([said.key, *filter(None, [said.why, default if said.default else ""])])


def without_auto(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says: ``"auto"`` and ``null`` are the same as no key."""
    return {
        name: without_auto(value) if isinstance(value, dict) else value
        for name, value in raw.items()
        if value is not None and value != "auto"
    }


def part_of(raw: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object within the file; empty where there is none."""
    for name in names:
        value = raw.get(name)
        raw = value if isinstance(value, dict) else {}
    return raw


def type_problems(raw: Mapping[str, Any], otherwise: str) -> Iterator[str]:
    """Whether the optimizer is one that gptpar has.

    Args:
        otherwise: what to do without the section.
    """
    optimizer = part_of(raw, "optimizer")
    kind = optimizer.get("type")
    if optimizer and str(kind).lower() not in ("adam", "adamw", "auto", *OPTIMIZER_SECTIONS):
        yield (
            f'optimizer.type is {json.dumps(kind)}, and gptpar\'s optimizers are AdamW and Lion: set it to "AdamW" or '
            f'"Lion", or leave optimizer out and {otherwise}.'
        )


def optimizer_section(raw: Mapping[str, Any]) -> Tree | None:
    """The keys of ``optimizer``, where its type has others than AdamW."""
    return OPTIMIZER_SECTIONS.get(str(part_of(raw, "optimizer").get("type")).lower())


def decay_problems(raw: Mapping[str, Any], assumed: float) -> Iterator[str]:
    """Whether the weight decay is decoupled.

    Args:
        assumed: the weight decay where the file says none.
    """
    optimizer, params = part_of(raw, "optimizer"), part_of(raw, "optimizer", "params")
    decay = params.get("weight_decay", assumed)
    if str(optimizer.get("type")).lower() == "adam" and params.get("adam_w_mode") is False and decay not in (0, None):
        yield (
            f"optimizer.params.adam_w_mode is false: Adam would add the weight decay {json.dumps(decay)} to the "
            "gradient, and gptpar takes it off the weights (AdamW); drop adam_w_mode, or set weight_decay to 0."
        )


def schedule_problems(raw: Mapping[str, Any]) -> Iterator[str]:
    """What a schedule needs, and where DeepSpeed's default would surprise."""
    params, rate = part_of(raw, "scheduler", "params"), part_of(raw, "optimizer", "params").get("lr", "auto")
    kind, peak = part_of(raw, "scheduler").get("type"), params.get("warmup_max_lr", "auto")
    if kind == "WarmupDecayLR" and peak in ("auto", None) and rate not in ("auto", None, 1e-3):
        yield (
            f"scheduler.params.warmup_max_lr is absent, so DeepSpeed would train at 0.001 and not at "
            f"optimizer.params.lr {json.dumps(rate)}: give it."
        )
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and "total_num_steps" not in params:
        yield "scheduler.params.total_num_steps is missing: the number of steps until the lowest rate."


def _defaults(raw: Mapping[str, Any], micro_is_known: bool) -> dict[str, Any]:
    """What DeepSpeed assumes where the file says nothing, as far as it differs from gptpar's own defaults."""
    found: dict[str, Any] = {"gradient_clipping": 1.0}
    if "train_batch_size" in raw and "train_micro_batch_size_per_gpu" not in raw and not micro_is_known:
        found["gradient_accumulation_steps"] = 1
    if "fp16" in raw:
        found["fp16"] = {"initial_scale_power": 16}
    if "optimizer" in raw:
        found["optimizer"] = {"params": {"weight_decay": 0.0}}
    kind = str(part_of(raw, "scheduler").get("type"))
    if kind in SCHEDULE_DEFAULTS:
        found["scheduler"] = {"params": SCHEDULE_DEFAULTS[kind]}
    return found


def _absent(defaults: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults without the keys that ``raw`` has."""
    found = {}
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            found[name] = _absent(value, part_of(raw, name))
        elif name not in raw:
            found[name] = value
    return found


def _leave_out_unused(reader: KeyReader, flags: Flags) -> None:
    """Move what depends on something that is off, or that another key overrules, to what has no effect."""
    for start, why in _reasons_without_effect(reader.said, flags).items():
        unused = [s for s in reader.said if s.key.startswith(start) and s.key != "fp16.enabled"]
        reader.without_effect += [f"{s.key}: {why}" for s in unused if not s.default]
        reader.said = [s for s in reader.said if s not in unused]


def _reasons_without_effect(said: list[Said], flags: Flags) -> dict[str, str]:
    """What a key begins with -> why it changes nothing beside the other keys and flags."""
    on = {s.field for s in said if s.value is True}
    devices = {s.raw for s in said if s.key.endswith("offload_optimizer.device")}
    peaks = [s for s in said if s.key == "scheduler.params.warmup_max_lr" and s.field == "optimizer.lr"]
    fp16 = flags.precision.fp16 or "precision.fp16" in on
    offloads = flags.offload.cpu_optimizer or "offload.cpu_optimizer" in on
    rules = [
        ("fp16.", fp16, "fp16 is not enabled"),
        ("zero_optimization.offload_optimizer.ratio", offloads, "nothing is offloaded"),
        ("zero_optimization.offload_optimizer.nvme_path", "nvme" in devices, "it is for NVMe"),
        ("optimizer.params.lr", all(s.default for s in peaks), "scheduler.params.warmup_max_lr is the peak"),
    ]
    return {start: why for start, has_effect, why in rules if not has_effect}
