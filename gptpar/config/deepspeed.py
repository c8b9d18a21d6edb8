"""A DeepSpeed configuration in terms of the fields here. Pure but for reading the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptpar.config import Config
from gptpar.config.deepspeed_keys import (
    DEFAULTS_SINCE,
    KEYS,
    SCHEDULE_DEFAULTS,
    SCHEDULES,
    Elsewhere,
    Sets,
    Tree,
    number,
    style,
)
from gptpar.config.deepspeed_reader import Reader, Said
from gptpar.config.derive import Derived
from gptpar.config.fields import flag_name
from gptpar.config.jsonc import JsonError, read_object


@dataclass
class FromFile:
    """What is known with the file.

    Attributes:
        config: the command line's, filled where the file says more.
        given: the fields that the file says, as ``section.field``.
        derived: their values, and those that DeepSpeed assumes, for the banner.
        problems, without_effect: as a command line's.
    """

    config: Config
    given: set[str] = field(default_factory=set)
    derived: list[Derived] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


def read_deepspeed(config: Config, given: Set[str]) -> FromFile:
    """Read the file that ``--deepspeed_config`` names.

    Args:
        config: what the command line says.
        given: the fields that it sets.
    """
    asked, path = config.deepspeed.deepspeed, config.deepspeed.deepspeed_config
    if path is None:
        missing = "--deepspeed needs --deepspeed_config FILE, DeepSpeed's JSON: give it, or drop --deepspeed."
        return FromFile(config, problems=[missing] if asked else [])
    if not asked:
        return FromFile(config, problems=[f"--deepspeed_config {path} is read with --deepspeed only: add it."])
    try:
        raw = read_object(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): name a file."
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8: save it as text."
    except JsonError as error:
        problem = f"{error}; correct it."
    else:
        return translate(raw, config, given, path)
    return FromFile(config, problems=[f"--deepspeed_config {path}: {problem}"])


def translate(raw: Mapping[str, Any], config: Config, given: Set[str], path: str) -> FromFile:
    """Fill what the command line leaves open.

    Args:
        raw: the parsed file.
        config, given: the command line, and the fields that it sets.
        path: the file's name, for the sentences.
    """
    reader, defaults = Reader(), Reader(default=True)
    plain = _without_auto(raw)
    reader.problems += [*_optimizer_problems(raw, config, given), *_schedule_problems(raw, config)]
    tree = _tree(raw, config)
    reader.walk(raw, tree)
    defaults.walk(_absent(_defaults(plain, given), plain), tree)
    reader.problems += defaults.problems
    reader.said += defaults.said
    reader.said += _rates_of_ratios(plain, reader.said, config)
    _leave_out_unused(reader, config)
    found = FromFile(config, problems=reader.problems, without_effect=reader.without_effect)
    _merge(reader.said, given, path, found)
    found.problems = [f"{path}: {problem}" for problem in found.problems]
    return found


def _without_auto(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says: ``"auto"`` and ``null`` are the same as no key."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in raw.items()
        if value is not None and value != "auto"
    }


def _part(raw: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object within the file; empty where there is none."""
    for name in names:
        value = raw.get(name)
        raw = value if isinstance(value, dict) else {}
    return raw


def _tree(raw: Mapping[str, Any], config: Config) -> Tree:
    """The keys that the file may hold: those of the optimizer and the schedule follow from their types."""
    tree = dict(KEYS)
    if any(_type_problems(raw)):
        tree["optimizer"] = Elsewhere()
    if _in_steps(config):
        params = SCHEDULES.get(str(_part(raw, "scheduler").get("type")), Elsewhere())
        tree["scheduler"] = {"type": Sets(style, ("optimizer.lr_decay_style",)), "params": params}
    return tree


def _defaults(raw: Mapping[str, Any], given: Set[str]) -> dict[str, Any]:
    """What DeepSpeed assumes where the file says nothing, as far as it differs from gptpar's own defaults."""
    found: dict[str, Any] = {"gradient_clipping": 1.0}
    micro_is_known = "train_micro_batch_size_per_gpu" in raw or "batch.micro_batch_size" in given
    if "train_batch_size" in raw and not micro_is_known:
        found["gradient_accumulation_steps"] = 1
    if "fp16" in raw:
        found["fp16"] = {"initial_scale_power": 16}
    if "optimizer" in raw:
        found["optimizer"] = {"params": {"weight_decay": 0.0}}
    kind = str(_part(raw, "scheduler").get("type"))
    if kind in SCHEDULE_DEFAULTS:
        found["scheduler"] = {"params": SCHEDULE_DEFAULTS[kind]}
    return found


def _absent(defaults: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults without the keys that ``raw`` has."""
    found = {}
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            found[name] = _absent(value, _part(raw, name))
        elif name not in raw:
            found[name] = value
    return found


def _type_problems(raw: Mapping[str, Any]) -> Iterator[str]:
    optimizer = _part(raw, "optimizer")
    kind = optimizer.get("type")
    if optimizer and str(kind).lower() not in ("adam", "adamw", "auto"):
        yield (
            f'optimizer.type is {json.dumps(kind)}, and gptpar\'s optimizer is AdamW: set it to "AdamW", or leave '
            "optimizer out and give --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps."
        )


def _optimizer_problems(raw: Mapping[str, Any], config: Config, given: Set[str]) -> Iterator[str]:
    yield from _type_problems(raw)
    optimizer, params = _part(raw, "optimizer"), _part(raw, "optimizer", "params")
    typed = config.optimizer.weight_decay if "optimizer.weight_decay" in given else 0
    decay = params.get("weight_decay", typed)
    if str(optimizer.get("type")).lower() == "adam" and params.get("adam_w_mode") is False and decay not in (0, None):
        yield (
            f"optimizer.params.adam_w_mode is false: Adam would add the weight decay {json.dumps(decay)} to the "
            "gradient, and gptpar takes it off the weights (AdamW); drop adam_w_mode, or set weight_decay to 0."
        )


def _in_steps(config: Config) -> bool:
    """Whether the run is measured in steps; a limit in tokens beside them does not change the unit."""
    batch = config.batch
    return batch.train_iters is not None or (batch.train_samples is None and batch.train_tokens is None)


def _schedule_problems(raw: Mapping[str, Any], config: Config) -> Iterator[str]:
    if "scheduler" in raw and not _in_steps(config):
        unit = "samples" if config.batch.train_samples is not None else "tokens"
        yield (
            f"scheduler counts steps, and this run is measured in {unit}: leave scheduler out and give "
            f"--lr-decay-style and --lr-warmup-{unit}, or give --train-iters."
        )
        return
    params, rate = _part(raw, "scheduler", "params"), _part(raw, "optimizer", "params").get("lr", "auto")
    kind, peak = _part(raw, "scheduler").get("type"), params.get("warmup_max_lr", "auto")
    if kind == "WarmupDecayLR" and peak in ("auto", None) and rate not in ("auto", None, 1e-3):
        yield (
            f"scheduler.params.warmup_max_lr is absent, so DeepSpeed would train at 0.001 and not at "
            f"optimizer.params.lr {json.dumps(rate)}: give it."
        )
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and "total_num_steps" not in params:
        yield "scheduler.params.total_num_steps is missing: the number of steps until the lowest rate."


def _rates_of_ratios(raw: Mapping[str, Any], said: list[Said], config: Config) -> Iterator[Said]:
    """WarmupCosineLR says its lowest rates as shares of the peak."""
    if _part(raw, "scheduler").get("type") != "WarmupCosineLR":
        return
    peak = next((s.value for s in said if s.field == "optimizer.lr"), config.optimizer.lr)
    params = _part(raw, "scheduler", "params")
    for name, rate in (("warmup_min_ratio", "lr_warmup_init"), ("cos_min_ratio", "min_lr")):
        raw_ratio = params.get(name, SCHEDULE_DEFAULTS["WarmupCosineLR"][name])
        try:
            ratio = number(raw_ratio)
        except ValueError:  # the reader has told of it
            continue
        if peak is not None:
            key, why = f"scheduler.params.{name}", f"{ratio:g} x the peak {peak:g}"
            yield Said(f"optimizer.{rate}", ratio * peak, key, raw_ratio, why, name not in params)


def _leave_out_unused(reader: Reader, config: Config) -> None:
    """Move what depends on something that is off, or that another key overrules, to what has no effect."""
    on = {s.field for s in reader.said if s.value is True}
    devices = {s.raw for s in reader.said if s.key.endswith("offload_optimizer.device")}
    overruled = any(s.key == "scheduler.params.warmup_max_lr" and not s.default for s in reader.said)
    reasons = {
        "fp16.": None if "precision.fp16" in on or config.precision.fp16 else "fp16 is not enabled",
        "zero_optimization.offload_optimizer.ratio": (
            None if "offload.cpu_optimizer" in on or config.offload.cpu_optimizer else "nothing is offloaded"
        ),
        "zero_optimization.offload_optimizer.nvme_path": None if "nvme" in devices else "it is for NVMe",
        "optimizer.params.lr": "scheduler.params.warmup_max_lr is the peak" if overruled else None,
    }
    for start, why in reasons.items():
        if why is None:
            continue
        unused = [s for s in reader.said if s.key.startswith(start) and s.key != "fp16.enabled"]
        reader.without_effect += [f"{s.key}: {why}" for s in unused if not s.default]
        reader.said = [s for s in reader.said if s not in unused]


def _merge(said: list[Said], given: Set[str], path: str, found: FromFile) -> None:
    """What is typed stays; what the file says and, where neither says anything, DeepSpeed's defaults are filled in."""
    chosen: dict[str, Said] = {}
    for one in sorted(said, key=lambda one: one.default):
        section, name = one.field.split(".")
        before = chosen.setdefault(one.field, one)
        typed = getattr(getattr(found.config, section), name)
        if before is not one:
            if not one.default and before.value != one.value:
                found.problems.append(f"{before}, but {one}: keep one.")
        elif one.field not in given:
            found.config = found.config.update(section, **{name: one.value})
            if not one.default:
                found.given.add(one.field)
            if one.value is not None and one.value is not False:
                found.derived.append(Derived(name.replace("_", " "), one.value, _reason(one, path)))
        elif not one.default and not _equal(typed, one.value):
            flag = flag_name(name) if typed is True else f"{flag_name(name)} {typed}"
            found.problems.append(f"{one}, but {flag} is given, too: drop one of them, or make them agree.")


def _reason(said: Said, path: str) -> str:
    default = f"absent, so DeepSpeed's default{DEFAULTS_SINCE.get(said.key, '')}"
    notes = [said.why, default if said.default else ""]
    return "; ".join([f"{path}: {said.key}", *filter(None, notes)])


def _equal(typed: Any, said: Any) -> bool:
    """Whether a flag and a key say the same; a share may be written as 0.3 or 0.30."""
    try:
        return float(typed) == float(said)
    except (TypeError, ValueError):
        return bool(typed == said)
