"""Puts a DeepSpeed file's values into the flags, and reports contradictions. Pure but for reading the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_reader import Said, optimizer_problems, part_of, read_file, read_values, schedule_problems
from gptpar.config.deepspeed_rules import Door
from gptpar.config.fields import Derived, flag_name
from gptpar.config.parsed import ParsedFlags

_RATE = "optimizer.lr"
_RATES_AS_FLAGS = "give --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps"
_FORMATS = ("precision.fp16", "precision.bf16")
_SCALE = ("precision.loss_scale", "precision.initial_loss_scale")
_STAGE = "parallel.zero_stage"
_DECIDED = {**dict.fromkeys(_FORMATS, "number format"), **dict.fromkeys(_SCALE, "loss scale"), _STAGE: "ZeRO stage"}
"""Field that a file decides, as with DeepSpeed -> its name in sentences."""


def read_deepspeed(parsed: ParsedFlags) -> None:
    """Fill what the command line leaves open from the file that ``--deepspeed_config`` names."""
    asked, path = parsed.flags.deepspeed.deepspeed, parsed.flags.deepspeed.deepspeed_config
    if path is None:
        if asked:
            parsed.problems.append(
                "--deepspeed needs --deepspeed_config FILE, DeepSpeed's JSON: give it, or drop --deepspeed."
            )
    elif not asked:
        parsed.problems.append(f"--deepspeed_config {path} is read with --deepspeed only: add it.")
    else:
        try:
            raw = read_file(path)
        except ValueError as error:
            parsed.problems.append(f"--deepspeed_config {path}: {error}")
            parsed.refused |= {"batch.micro_batch_size", "batch.global_batch_size", _RATE}
        else:
            parsed.problems += [f"{path}: {problem}" for problem in _translate(raw, path, parsed)]


def _translate(raw: Mapping[str, Any], path: str, parsed: ParsedFlags) -> list[str]:
    """Fill the fields that the command line leaves open; a sentence for each problem.

    Args:
        raw: the parsed file.
        path: the file's name.
    """
    flags, given = parsed.flags, frozenset(parsed.given)
    unread = _unread(raw, flags, given)
    raw = {section: said for section, said in raw.items() if section not in unread}
    reader = read_values(raw, Door.PRETRAIN, flags, micro_is_known="batch.micro_batch_size" in given)
    values, parsed.deepspeed_file = reader.values, path
    decay = flags.optimizer.weight_decay if "optimizer.weight_decay" in given else 0
    problems = [*optimizer_problems(raw, _RATES_AS_FLAGS, decay), *_schedule_problems(raw, flags), *reader.problems]
    decided = _decided(raw, values, flags)
    parsed.without_effect += [*reader.without_effect, *unread.values(), *_overruled(decided & given, values, parsed)]
    for one in values.values():
        if not one.field.startswith("scheduler."):
            problems += _fill(one, given - decided, parsed)
    if not problems and "scheduler.type" in values and _in_steps(flags):
        problems += _fill_schedule(values, given, parsed)
    if "lr" in part_of(raw, "optimizer", "params") and _RATE not in parsed.given:
        parsed.refused.add(_RATE)
    return problems


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


def _overruled(decided: Set[str], values: Mapping[str, Said], parsed: ParsedFlags) -> Iterator[str]:
    """A remark for each typed field on which the file decides otherwise, as with DeepSpeed."""
    for name in sorted(decided):
        word, typed = name.split(".")[1], parsed.flags.value(name)
        if name in values and values[name].value == typed:
            continue
        if name in _FORMATS and name not in values:
            parsed.flags = parsed.flags.with_values({name: False})
        yield f"{_typed(word, typed)}: {parsed.deepspeed_file} decides on the {_DECIDED[name]}, as with DeepSpeed"


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


def _fill(one: Said, given: Set[str], parsed: ParsedFlags) -> Iterator[str]:
    """Fill a field that nobody typed, from the file or from DeepSpeed's default; a typed flag stays."""
    name, typed = one.field.split(".")[1], parsed.flags.value(one.field)
    if one.field not in given:
        parsed.flags = parsed.flags.with_values({one.field: one.value})
        parsed.deepspeed_keys[flag_name(name)] = f"{one.key} (DeepSpeed's default)" if one.default else one.key
        if not one.default:
            parsed.given.add(one.field)
        if one.value is not None and one.value is not False:
            reason = f"{parsed.deepspeed_file}: {one.reason}"
            parsed.derived.append(Derived(name.replace("_", " "), one.value, reason))
    elif not one.default and typed != one.value:
        yield f"{one}, but {_typed(name, typed)} is given, too: drop one of them, or make them agree."


def _typed(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def _fill_schedule(values: Mapping[str, Said], given: Set[str], parsed: ParsedFlags) -> Iterator[str]:
    """Set the file's schedule as a whole."""
    schedule = schedule_of(values, parsed.flags, given)
    for one, name, typed in schedule.contradictions:
        yield (
            f"{one}, but {_typed(name, typed)} is given, too, and DeepSpeed follows the file before 0.14.5, flags "
            "since: drop one of them, or make them agree."
        )
    parsed.flags = parsed.flags.update("optimizer", scheduler={"type": schedule.type, "params": schedule.params})
    if schedule.peak is not None:
        parsed.flags = parsed.flags.update("optimizer", lr=schedule.peak)
        parsed.given.add(_RATE)
    for word, value in schedule.params.items():
        one = values.get(f"scheduler.{word}", values["scheduler.type"])
        reason = f"{parsed.deepspeed_file}: {one.reason}"
        parsed.derived.append(Derived(word.replace("_", " "), value, reason))


_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_FLAGS = {
    "warmup_min_lr": "lr_warmup_init",
    "warmup_max_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
"""Parameter of a schedule -> the flag that means the same, and counts if the file lacks the parameter."""
_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
_OTHER_LENGTHS = ("lr_decay_samples", "lr_decay_tokens", "lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_tokens")


@dataclass(frozen=True)
class FileSchedule:
    """A schedule of DeepSpeed's.

    Attributes:
        type: one of ``gptpar.optim.step_schedules.FORMULAS``.
        params: the parameters of its formula.
        peak: the rate in place of ``--lr``; ``None``: the optimizer's rate.
        contradictions: (the file's value, the field of a flag that contradicts it, the flag's value).
    """

    type: str
    params: dict[str, Any]
    peak: float | None
    contradictions: list[tuple[Said, str, Any]]


def schedule_of(values: Mapping[str, Said], flags: Flags, given: Set[str]) -> FileSchedule:
    """The file's schedule. A flag may give a parameter that the file lacks; other flags of the schedule contradict it.

    Args:
        values: the file's values and DeepSpeed's defaults, by field.
        flags: the command line's, with the file's optimizer.
        given: the fields that were typed.
    """
    kind = values["scheduler.type"]
    said = {name.removeprefix("scheduler."): one for name, one in values.items() if name.startswith("scheduler.")}
    del said["type"]
    typed = {word: getattr(flags.optimizer, flag) for word, flag in _FLAGS.items() if f"optimizer.{flag}" in given}
    params = _params(kind.value, said, typed, flags)
    contradictions = [
        (said.get(word, kind), _FLAGS[word], value) for word, value in typed.items() if params.get(word, value) != value
    ]
    contradictions += [(kind, name, value) for name, value in _other_shape(kind.value, params, flags, given)]
    peak = next((params[name] for name in _PEAKS if name in params), None)
    return FileSchedule(kind.value, params, peak, contradictions)


def _params(kind: str, said: Mapping[str, Said], typed: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """All parameters: those that the file lacks come from the optimizer's rate, the flags or the run's length."""
    optimizer = flags.optimizer
    known = {**typed} if optimizer.lr is None else {**typed, "warmup_max_lr": optimizer.lr}
    params = {word: known[word] if one.default and word in known else one.value for word, one in said.items()}
    if kind in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", optimizer.lr_decay_iters or flags.batch.train_iters)
    return params


def _other_shape(kind: str, params: Mapping[str, Any], flags: Flags, given: Set[str]) -> Iterator[tuple[str, Any]]:
    """(field, value) of each typed flag that describes another schedule."""
    optimizer = flags.optimizer
    lowest = params.get("warmup_min_lr") if kind == "WarmupDecayLR" else None
    if kind == "WarmupCosineLR" and optimizer.lr is not None:
        lowest = params["cos_min_ratio"] * optimizer.lr
    agrees = {
        "lr_decay_style": _STYLES.get(kind) == optimizer.lr_decay_style,
        "min_lr": lowest is None or math.isclose(lowest, optimizer.min_lr, rel_tol=1e-9),
    }
    for name in (*agrees, *_OTHER_LENGTHS):
        if f"optimizer.{name}" in given and not agrees.get(name, False):
            yield name, getattr(optimizer, name)
