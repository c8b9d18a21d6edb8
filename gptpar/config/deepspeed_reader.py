"""Reads a DeepSpeed configuration by the table of keys: its values, and DeepSpeed's defaults. Pure.

``gptpar pretrain`` and ``gptpar.initialize`` read files alike. ``pretrain`` also has flags, and takes from the file the
values that they leave open.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_optimizers import OPTIMIZERS
from gptpar.config.deepspeed_rules import OFF, Absent, Door, NoEffect, NotRead, Only, Rule, Sets, Tree
from gptpar.config.deepspeed_table import DEFAULTS_SINCE, IGNORED, defaults_for, keys_for
from gptpar.config.jsonc import JsonError, read_object

MAX_LISTED = 12
MISTYPED = 0.85
"""Least likeness (0 to 1) of an unknown key and a known one: ``comment`` is not ``comet``."""
WITHOUT_UNKNOWN = (
    *("zero_optimization.", "fp16.", "bf16.", "bfloat16.", "optimizer.params.", "scheduler.params.", "gptpar."),
)
"""Sections in which DeepSpeed (the last one: gptpar) refuses keys that it does not know."""
WITH_UNKNOWN = (
    *("pipeline.", "activation_checkpointing.", "optimizer.", "scheduler.", "checkpoint.", "aio.", "flops_profiler."),
)
"""DeepSpeed ignores unknown keys in these sections and at the top level."""


@dataclass(frozen=True)
class Said:
    """A field's value from a key.

    Attributes:
        field: ``section.field``.
        raw: the value as the file writes it.
        why: a remark for the banner.
        default: whether it is DeepSpeed's default, because the file lacks the key.
    """

    field: str
    value: Any
    key: str
    raw: Any
    why: str
    default: bool

    def __str__(self) -> str:
        return f"{self.key} is {json.dumps(self.raw)}"

    @property
    def reason(self) -> str:
        """The origin of the value: its key, and remarks for the banner."""
        default = f"absent, so DeepSpeed's default{DEFAULTS_SINCE.get(self.key, '')}"
        return "; ".join([self.key, *filter(None, [self.why, default if self.default else ""])])


@dataclass
class KeyReader:
    """Collects the values of a file's keys.

    Attributes:
        tree: all known keys.
        said: values of fields; several for a field that several keys set.
        values: in the end, the value of each field.
        problems: sentences, without the file's name.
        without_effect: keys that change nothing, each with the reason.
    """

    tree: Tree
    said: list[Said] = field(default_factory=list)
    values: dict[str, Said] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)

    def walk(self, raw: Mapping[str, Any], tree: Tree | None = None, prefix: str = "") -> None:
        """Read an object whose keys are ``tree``'s (default: all); ``null`` and ``"auto"`` count as absent."""
        tree = self.tree if tree is None else tree
        for name, value in raw.items():
            key, rule = prefix + name, tree.get(name)
            if rule is None and prefix in ("", *WITH_UNKNOWN) and value in (None, "auto"):
                self.without_effect.append(f"{key}: {IGNORED}")
            elif rule is None:
                self._unknown(name, value, prefix, tree)
            elif value is None or value == "auto":
                continue
            elif not isinstance(rule, dict):
                self._read(key, value, rule)
            elif key == "zero_optimization" and isinstance(value, bool):  # DeepSpeed's first form of it
                self.walk({"stage": int(value)}, rule, f"{key}.")
            elif isinstance(value, dict):
                self.walk(value, rule, f"{key}.")
            else:
                self._wrong(key, value, "an object in braces is needed")

    def assume(self, path: str, value: Any) -> None:
        """Take DeepSpeed's default of a key."""
        rule = self._rule_of(path)
        if isinstance(rule, Sets):
            self._set(path, value, rule, default=True)

    def _read(self, key: str, value: Any, rule: Rule) -> None:
        if isinstance(rule, Sets | NoEffect) and rule.inside and isinstance(value, dict):
            self.walk(value, dict.fromkeys(rule.inside.split(), NotRead()), f"{key}.")
        if isinstance(rule, Sets):
            try:
                self._set(key, value, rule)
            except ValueError as error:
                self._wrong(key, value, str(error))
        elif isinstance(rule, Only):
            if value not in rule.values:
                self._wrong(key, value, rule.why)
        elif isinstance(rule, Absent):
            if rule.is_on(value):
                self.problems.append(f"{key}: {rule.what} is not part of gptpar; leave it out.")
            else:
                self.without_effect.append(f"{key}: it is off")
        elif isinstance(rule, NoEffect):
            if rule.inside and not isinstance(value, dict):
                self._wrong(key, value, "an object in braces is needed")
            else:
                self.without_effect.append(f"{key}: {rule.why}")

    def _set(self, key: str, value: Any, rule: Sets, *, default: bool = False) -> None:
        read, fields = rule.read(value), rule.to.split()
        if read is OFF:
            self.without_effect.append(f"{key}: {rule.off}")
            return
        values = read if isinstance(read, list) else [read] * len(fields)
        for name, one in zip(fields, values, strict=True):
            if one is not OFF:
                self.said.append(Said(name, one, key, value, rule.why, default))

    def _wrong(self, key: str, value: Any, why: str) -> None:
        self.problems.append(f"{key} is {json.dumps(value)}: {why}.")

    def _unknown(self, name: str, value: Any, prefix: str, tree: Tree) -> None:
        """Ignore a key that DeepSpeed ignores, unless it resembles a known key; refuse any other unknown key."""
        key, dotted = prefix + name, self._rule_of(name)
        if isinstance(dotted, NoEffect) and not prefix:  # zero_optimization.reduce_bucket_size as one name, from TRL
            self.without_effect.append(f"{key}: {dotted.why}")
            return
        near = self._nearest(name, prefix, tree)
        near = near if self._can_mean(near, value, prefix) else ""
        is_short = prefix and len(tree) <= MAX_LISTED and prefix not in WITH_UNKNOWN
        listed = f"; the keys there are {', '.join(tree)}." if is_short else "; leave it out."
        if near or key.startswith(WITHOUT_UNKNOWN) or "." in name or listed.startswith("; the"):
            self.problems.append(f"{key} is unknown{f'; did you mean {near}?' if near else listed}")
        else:
            self.without_effect.append(f"{key}: {IGNORED}")

    def _rule_of(self, path: str) -> Rule | Tree | None:
        rule: Any = self.tree
        for name in path.split("."):
            rule = rule.get(name) if isinstance(rule, dict) else None
        return rule

    def _can_mean(self, path: str, value: Any, prefix: str) -> bool:
        """Whether a known key may be meant: the sections share keys, and a loss scale is not looked for in bf16."""
        if path.startswith("fp16.") and prefix.startswith("bf"):
            return False
        rule = self._rule_of(path)
        inside = (
            rule.inside.split() if isinstance(rule, Sets | NoEffect) else list(rule) if isinstance(rule, dict) else []
        )
        return not (isinstance(value, dict) and value and inside) or not value.keys().isdisjoint(inside)

    def _nearest(self, name: str, prefix: str, tree: Tree) -> str:
        """The only key of the same name elsewhere, else the nearest beside it; of a key in no section, anywhere."""
        beside = {other: prefix + other for other in tree}
        paths = [(word, path) for word, path in _paths(self.tree) if not path.startswith("bf")]  # fp16's have effect
        words = Counter(word for word, _ in paths)
        anywhere = {word: path for word, path in paths if words[word] == 1}
        if name in anywhere:
            return anywhere[name]
        for known in (beside, {} if prefix else anywhere):
            if near := difflib.get_close_matches(name, known, n=1, cutoff=MISTYPED):
                return known[near[0]]
        return ""


def _paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(last word, whole path) of every key."""
    for name, rule in tree.items():
        yield name, prefix + name
        if isinstance(rule, dict):
            yield from _paths(rule, f"{prefix}{name}.")


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


def read_values(raw: Mapping[str, Any], door: Door, flags: Flags, *, micro_is_known: bool) -> KeyReader:
    """The values of a file and DeepSpeed's defaults, without those that have no effect beside the others.

    Args:
        raw: the parsed file.
        flags: the command line's, which may turn on the options that the file's keys refine.
        micro_is_known: whether the command line says the micro-batch size.
    """
    reader, plain = KeyReader(keys_for(raw, door)), without_auto(raw)
    reader.walk(raw)
    defaults = defaults_for(plain)
    if "train_batch_size" in plain and "train_micro_batch_size_per_gpu" not in plain and not micro_is_known:
        defaults["gradient_accumulation_steps"] = 1
    for path, value in defaults.items():
        *sections, name = path.split(".")
        if name not in part_of(plain, *sections):
            reader.assume(path, value)
    _leave_out_unused(reader, flags, door)
    for one in sorted(reader.said, key=lambda one: one.default):  # what the file says goes before what is assumed
        before = reader.values.setdefault(one.field, one)
        if not one.default and before.value != one.value:
            reader.problems.append(f"{before}, but {one}: keep one.")
    return reader


def without_auto(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys without those of ``"auto"`` or ``null``, which are the same as no key."""
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


def optimizer_problems(
    raw: Mapping[str, Any], otherwise: str, assumed_decay: float = 0, others: Sequence[str] = ()
) -> Iterator[str]:
    """Problems of the optimizer: gptpar has none of its kind, or would treat its weight decay otherwise.

    Args:
        others: further types in small letters, for a reader that has Adam's coupled weight decay, too.
        otherwise: what to do without the section.
        assumed_decay: the weight decay where the file says none.
    """
    optimizer, params = part_of(raw, "optimizer"), part_of(raw, "optimizer", "params")
    kind, decay = optimizer.get("type"), params.get("weight_decay", "auto")
    decay = assumed_decay if decay == "auto" else decay
    if optimizer and str(kind).lower() not in ("auto", *OPTIMIZERS, *others):
        more = f" (and torch's {', '.join(others)})" if others else ""
        yield (
            f"optimizer.type is {json.dumps(kind)}, and gptpar's optimizers are AdamW, Lion and Muon{more}: set it to "
            f"one of these, or leave optimizer out and {otherwise}."
        )
    if not others and str(kind).lower() == "adam" and params.get("adam_w_mode") is False and decay not in (0, None):
        yield (
            f"optimizer.params.adam_w_mode is false: Adam would add the weight decay {json.dumps(decay)} to the "
            "gradient, and gptpar takes it off the weights (AdamW); drop adam_w_mode, or set weight_decay to 0."
        )


def schedule_problems(raw: Mapping[str, Any], *, auto_is_known: bool = False, warns: bool = False) -> Iterator[str]:
    """Problems of a schedule: missing parameters, and a default of DeepSpeed's that contradicts the optimizer's rate.

    Args:
        auto_is_known: whether flags or the run's length give the parameters that the file leaves to them (``"auto"``).
        warns: whether that default is taken, with a warning.
    """
    params, rate = part_of(raw, "scheduler", "params"), part_of(raw, "optimizer", "params").get("lr", "auto")
    kind, absent = part_of(raw, "scheduler").get("type"), (None,) if auto_is_known else (None, "auto")
    if kind == "WarmupDecayLR" and params.get("warmup_max_lr") in absent and rate not in ("auto", None, 1e-3):
        sentence = (
            f"scheduler.params.warmup_max_lr is absent, so DeepSpeed would train at 0.001 and not at "
            f"optimizer.params.lr {json.dumps(rate)}: give it."
        )
        if warns:
            warnings.warn(f"{sentence} It is 0.001 here, too.", stacklevel=2)
        else:
            yield sentence
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and params.get("total_num_steps") in absent:
        yield "scheduler.params.total_num_steps is missing: the number of steps until the lowest rate."
    for name in ("cycle_min_lr", "cycle_max_lr") if kind == "OneCycle" else ():
        if params.get(name) in (None, "auto"):
            yield f"scheduler.params.{name} is missing: the {name[6:9]}imum of the cycle."


def _leave_out_unused(reader: KeyReader, flags: Flags, door: Door) -> None:
    """Move keys of options that are off, or that another key overrules, to the keys without effect."""
    of_some = {s.field for s in reader.said if s.key in ("optimizer.params.adam_lr", "optimizer.params.muon_lr")}
    reader.said = [s for s in reader.said if s.key != "optimizer.params.lr" or s.field not in of_some]
    for start, why in _reasons_without_effect(reader.said, flags, door).items():
        unused = [s for s in reader.said if s.key.startswith(start) and s.key != "fp16.enabled"]
        reader.without_effect += [f"{s.key}: {why}" for s in unused if not s.default]
        reader.said = [s for s in reader.said if s not in unused]


def _reasons_without_effect(said: list[Said], flags: Flags, door: Door) -> dict[str, str]:
    """Beginning of a key -> why the key has no effect beside the other keys and flags."""
    on = {s.field for s in said if s.value is True}
    devices = {s.raw for s in said if s.key.endswith("offload_optimizer.device")}
    peaks = [s for s in said if s.key == "scheduler.params.warmup_max_lr" and door is Door.PRETRAIN]
    fp16 = flags.precision.fp16 or "precision.fp16" in on
    offloads = flags.offload.cpu_optimizer or "offload.cpu_optimizer" in on
    recomputes = flags.recompute.checkpoint_activations or flags.recompute.recompute_granularity == "full"
    rules = [
        ("fp16.", fp16, "fp16 is not enabled"),
        ("zero_optimization.offload_optimizer.ratio", offloads, "nothing is offloaded"),
        ("zero_optimization.offload_optimizer.nvme_path", "nvme" in devices, "it is for NVMe"),
        ("optimizer.params.lr", all(s.default for s in peaks), "scheduler.params.warmup_max_lr is the peak"),
        ("activation_checkpointing.", recomputes, "nothing is recomputed without --recompute-granularity full"),
        ("activation_checkpointing.partition", _tokens_are_shared(flags), "no processes hold the same tokens"),
    ]
    return {start: why for start, has_effect, why in rules if not has_effect}


def _tokens_are_shared(flags: Flags) -> bool:
    """Whether processes hold the same activations between blocks."""
    return flags.parallel.tensor_model_parallel_size > 1 and not flags.parallel.sequence_parallel
