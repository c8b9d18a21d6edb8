"""Puts a DeepSpeed file's values into the flags, and reports contradictions. Pure but for reading the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_reader import (
    Said,
    one_each,
    optimizer_problems,
    part_of,
    read_file,
    read_values,
    schedule_problems,
)
from gptpar.config.deepspeed_rules import Door
from gptpar.config.deepspeed_schedule import schedule_of
from gptpar.config.derive import Derived
from gptpar.config.fields import flag_name

_RATE = "optimizer.lr"
_RATES_AS_FLAGS = "give --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps"
_FORMATS = ("precision.fp16", "precision.bf16")
_SCALE = ("precision.loss_scale", "precision.initial_loss_scale")
_STAGE = "parallel.zero_stage"
_DECIDED = {**dict.fromkeys(_FORMATS, "number format"), **dict.fromkeys(_SCALE, "loss scale"), _STAGE: "ZeRO stage"}
"""Field that a file decides, as with DeepSpeed -> its name in sentences."""


@dataclass
class FromFile:
    """The flags of a command line and its DeepSpeed file.

    Attributes:
        flags: the command line's, with the file's values where the command line has none.
        given: the fields that the file sets, as ``section.field``.
        refused: fields that the file sets in a section that is refused as a whole.
        derived: values of the file, and DeepSpeed's defaults, for the banner.
        problems, without_effect: as a command line's.
        keys: untyped flag -> the key of the file that sets it.
        path: of the file.
    """

    flags: Flags
    given: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    derived: list[Derived] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    path: str = ""

    def as_written(self, problem: str) -> str:
        """A sentence about flags; a flag that the file set is replaced by its key."""
        told = re.sub(r"--[\w-]+", lambda found: self.keys.get(found[0], found[0]), problem)
        return problem if told == problem else f"{self.path}: {told}"


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
        unknown = {"batch.micro_batch_size", "batch.global_batch_size", "optimizer.lr"}
        return FromFile(flags, problems=[f"--deepspeed_config {path}: {error}"], refused=unknown)
    return translate(raw, flags, given, path)


def translate(raw: Mapping[str, Any], flags: Flags, given: Set[str], path: str) -> FromFile:
    """Fill the fields that the command line leaves open.

    Args:
        raw: the parsed file.
        flags, given: the command line, and the fields that it sets.
        path: the file's name, for the sentences.
    """
    unread = _unread(raw, flags, given)
    raw = {section: said for section, said in raw.items() if section not in unread}
    reader = read_values(raw, Door.PRETRAIN, flags, micro_is_known="batch.micro_batch_size" in given)
    reader.without_effect += unread.values()
    decay = flags.optimizer.weight_decay if "optimizer.weight_decay" in given else 0
    found = FromFile(flags, without_effect=reader.without_effect, path=path)
    found.problems += [*optimizer_problems(raw, _RATES_AS_FLAGS, decay), *_schedule_problems(raw, flags)]
    found.problems += reader.problems
    if "lr" in part_of(raw, "optimizer", "params"):
        found.refused.add(_RATE)
    chosen, contradictions = one_each(reader.said)
    found.problems += contradictions
    values = {one.field: one for one in chosen}
    decided = _decided_by_the_file(raw, values, flags, given, found)
    for one in chosen:
        if not one.field.startswith("scheduler."):
            _fill(one, given - decided, found)
    if not found.problems and "scheduler.type" in values and _in_steps(flags):
        _fill_schedule(values, given, found)
    found.problems = [f"{path}: {problem}" for problem in found.problems]
    return found


def _unread(raw: Mapping[str, Any], flags: Flags, given: Set[str]) -> dict[str, str]:
    """Section that is not read -> why: DeepSpeed ignores the file's optimizer beside one that its caller has made.

    Megatron-DeepSpeed always makes it, with --lr. A rate of "auto" leaves itself alone to the flags, as with the
    Trainer of transformers.
    """
    if "optimizer" not in raw or _RATE not in given or part_of(raw, "optimizer", "params").get("lr") == "auto":
        return {}
    given_rate = f"--lr {flags.optimizer.lr:.10g} is given, on the command line or in the file of --config"
    made = f"{given_rate}, so flags make the optimizer, as in Megatron-DeepSpeed"
    return {"optimizer": f"optimizer: {made}; without it this section does"}


def _decided(raw: Mapping[str, Any], values: Mapping[str, Said], flags: Flags) -> set[str]:
    """The fields on which the file decides."""
    formats = [name for name in _FORMATS if name in values and values[name].value is True]
    decided = {*_FORMATS} if formats else set()
    if "fp16" in raw and "precision.fp16" in (formats or [*_FORMATS[: flags.precision.fp16]]):
        decided |= {*_SCALE}
    if _STAGE in values and values[_STAGE].value != flags.parallel.zero_stage:
        decided |= {_STAGE}
    return decided


def _decided_by_the_file(
    raw: Mapping[str, Any], values: Mapping[str, Said], flags: Flags, given: Set[str], found: FromFile
) -> set[str]:
    """Fields for which the file overrules the flags, as with DeepSpeed."""
    decided = _decided(raw, values, flags)
    for name in sorted(decided & given):
        section, word = name.split(".")
        typed = getattr(getattr(flags, section), word)
        if name in values and values[name].value == typed:
            continue
        if name in _FORMATS and name not in values:
            found.flags = found.flags.update(section, **{word: False})
        decides = f"{found.path} decides on the {_DECIDED[name]}, as with DeepSpeed"
        found.without_effect.append(f"{_typed(word, typed)}: {decides}")
    return decided


def _in_steps(flags: Flags) -> bool:
    """Whether the run's length is in steps; a limit in tokens beside them does not change the unit."""
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
    yield from schedule_problems(raw, auto_is_known=flags.batch.train_iters is not None)


def _fill(one: Said, given: Set[str], found: FromFile) -> None:
    """Fill a field that nobody typed, from the file or from DeepSpeed's default; a typed flag stays."""
    section, name = one.field.split(".")
    typed = getattr(getattr(found.flags, section), name)
    if one.field not in given:
        found.flags = found.flags.update(section, **{name: one.value})
        found.keys[flag_name(name)] = f"{one.key} (DeepSpeed's default)" if one.default else one.key
        if not one.default:
            found.given.add(one.field)
        if one.value is not None and one.value is not False:
            found.derived.append(Derived(name.replace("_", " "), one.value, f"{found.path}: {one.reason}"))
    elif not one.default and typed != one.value:
        found.problems.append(f"{one}, but {_typed(name, typed)} is given, too: drop one of them, or make them agree.")


def _typed(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def _fill_schedule(values: Mapping[str, Said], given: Set[str], found: FromFile) -> None:
    """Set the file's schedule as a whole."""
    schedule = schedule_of(values, found.flags, given)
    for one, name, typed in schedule.contradictions:
        found.problems.append(
            f"{one}, but {_typed(name, typed)} is given, too, and DeepSpeed follows the file before 0.14.5, flags "
            "since: drop one of them, or make them agree."
        )
    found.flags = found.flags.update("optimizer", scheduler={"type": schedule.type, "params": schedule.params})
    if schedule.peak is not None:
        found.flags = found.flags.update("optimizer", lr=schedule.peak)
        found.given.add("optimizer.lr")
    for word, value in schedule.params.items():
        one = values.get(f"scheduler.{word}", values["scheduler.type"])
        found.derived.append(Derived(word.replace("_", " "), value, f"{found.path}: {one.reason}"))
