"""A DeepSpeed configuration in terms of the command line's fields. Pure but for reading the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_keys import KEYS, SCHEDULE_DEFAULTS, SCHEDULES, Elsewhere, Sets, Tree, number, style
from gptpar.config.deepspeed_reader import Said
from gptpar.config.deepspeed_values import (
    decay_problems,
    one_each,
    optimizer_section,
    part_of,
    read_file,
    read_values,
    reason_of,
    schedule_problems,
    type_problems,
    without_auto,
)
from gptpar.config.derive import Derived
from gptpar.config.fields import flag_name

_RATES_AS_FLAGS = "give --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps"


@dataclass
class FromFile:
    """What is known with the file.

    Attributes:
        flags: the command line's, filled where the file says more.
        given: the fields that the file says, as ``section.field``.
        derived: their values, and those that DeepSpeed assumes, for the banner.
        problems, without_effect: as a command line's.
    """

    flags: Flags
    given: set[str] = field(default_factory=set)
    derived: list[Derived] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


def read_deepspeed(flags: Flags, given: Set[str]) -> FromFile:
    """Read the file that ``--deepspeed_config`` names.

    Args:
        flags: what the command line says.
        given: the fields that it sets.
    """
    asked, path = flags.deepspeed.deepspeed, flags.deepspeed.deepspeed_config
    if path is None:
        missing = "--deepspeed needs --deepspeed_config FILE, DeepSpeed's JSON: give it, or drop --deepspeed."
        return FromFile(flags, problems=[missing] if asked else [])
    if not asked:
        return FromFile(flags, problems=[f"--deepspeed_config {path} is read with --deepspeed only: add it."])
    try:
        raw = read_file(path)
    except ValueError as error:
        return FromFile(flags, problems=[f"--deepspeed_config {path}: {error}"])
    return translate(raw, flags, given, path)


def translate(raw: Mapping[str, Any], flags: Flags, given: Set[str], path: str) -> FromFile:
    """Fill what the command line leaves open.

    Args:
        raw: the parsed file.
        flags, given: the command line, and the fields that it sets.
        path: the file's name, for the sentences.
    """
    reader = read_values(raw, _tree(raw, flags), flags, micro_is_known="batch.micro_batch_size" in given)
    reader.said += _rates_of_ratios(without_auto(raw), reader.said, flags)
    found = FromFile(flags, without_effect=reader.without_effect)
    found.problems += [*_optimizer_problems(raw, flags, given), *_schedule_problems(raw, flags), *reader.problems]
    _merge(reader.said, given, path, found)
    found.problems = [f"{path}: {problem}" for problem in found.problems]
    return found


def _tree(raw: Mapping[str, Any], flags: Flags) -> Tree:
    """The keys that the file may hold: those of the optimizer and the schedule follow from their types."""
    tree = dict(KEYS)
    if any(type_problems(raw, _RATES_AS_FLAGS)):
        tree["optimizer"] = Elsewhere()
    elif section := optimizer_section(raw):
        tree["optimizer"] = section
    if _in_steps(flags):
        params = SCHEDULES.get(str(part_of(raw, "scheduler").get("type")), Elsewhere())
        tree["scheduler"] = {"type": Sets(style, ("optimizer.lr_decay_style",)), "params": params}
    return tree


def _optimizer_problems(raw: Mapping[str, Any], flags: Flags, given: Set[str]) -> Iterator[str]:
    yield from type_problems(raw, _RATES_AS_FLAGS)
    yield from decay_problems(raw, flags.optimizer.weight_decay if "optimizer.weight_decay" in given else 0)


def _in_steps(flags: Flags) -> bool:
    """Whether the run is measured in steps; a limit in tokens beside them does not change the unit."""
    batch = flags.batch
    return batch.train_iters is not None or (batch.train_samples is None and batch.train_tokens is None)


def _schedule_problems(raw: Mapping[str, Any], flags: Flags) -> Iterator[str]:
    if "scheduler" in raw and not _in_steps(flags):
        unit = "samples" if flags.batch.train_samples is not None else "tokens"
        yield (
            f"scheduler counts steps, and this run is measured in {unit}: leave scheduler out and give "
            f"--lr-decay-style and --lr-warmup-{unit}, or give --train-iters."
        )
        return
    yield from schedule_problems(raw)


def _rates_of_ratios(raw: Mapping[str, Any], said: list[Said], flags: Flags) -> Iterator[Said]:
    """WarmupCosineLR says its lowest rates as shares of the peak."""
    if part_of(raw, "scheduler").get("type") != "WarmupCosineLR":
        return
    peak = next((s.value for s in said if s.field == "optimizer.lr"), flags.optimizer.lr)
    params = part_of(raw, "scheduler", "params")
    for name, rate in (("warmup_min_ratio", "lr_warmup_init"), ("cos_min_ratio", "min_lr")):
        raw_ratio = params.get(name, SCHEDULE_DEFAULTS["WarmupCosineLR"][name])
        try:
            ratio = number(raw_ratio)
        except ValueError:  # the reader has told of it
            continue
        if peak is not None:
            key, why = f"scheduler.params.{name}", f"{ratio:g} x the peak {peak:g}"
            yield Said(f"optimizer.{rate}", ratio * peak, key, raw_ratio, why, name not in params)


def _merge(said: list[Said], given: Set[str], path: str, found: FromFile) -> None:
    """What is typed stays; what the file says and, where neither says anything, DeepSpeed's defaults are filled in."""
    chosen, contradictions = one_each(said)
    found.problems += contradictions
    for one in chosen:
        section, name = one.field.split(".")
        typed = getattr(getattr(found.flags, section), name)
        if one.field not in given:
            found.flags = found.flags.update(section, **{name: one.value})
            if not one.default:
                found.given.add(one.field)
            if one.value is not None and one.value is not False:
                found.derived.append(Derived(name.replace("_", " "), one.value, f"{path}: {reason_of(one)}"))
        elif not one.default and typed != one.value:
            flag = flag_name(name) if typed is True else f"{flag_name(name)} {typed}"
            found.problems.append(f"{one}, but {flag} is given, too: drop one of them, or make them agree.")
