"""``deepspeed.runtime.zero.config``, ``precision_config``: sections of the configuration as objects with defaults."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from gptpar.deepspeed.names import FACTS
from gptpar.errors import ArgumentError, ConfigError

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{model}.modeling_{model}.{name}SparseMoeBlock"
    for model, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
"""The classes that DeepSpeed marks unless it is told others."""

DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class ZeroStageEnum(int, enum.Enum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(enum.StrEnum):
    """Where an offload section puts things."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """What ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def _defaults_of(section: str) -> dict[str, Any]:
    """DeepSpeed's defaults of a section's keys, in its order."""
    return {key: None if value == "unset" else value for key, value in FACTS["defaults"][section].items()}


class _Section:
    """A section's keys as attributes; those that are not given have DeepSpeed's defaults.

    Raises:
        ConfigError: it has no such key; all are named.
    """

    _defaults: ClassVar[Mapping[str, Any]]
    _title: ClassVar[str]

    def __init__(self, **given: Any):
        given = {key: value for key, value in given.items() if value != "auto"}
        if unknown := sorted(given.keys() - self._defaults.keys()):
            raise ConfigError([f"{self._title} has no key {', '.join(unknown)}; it has {', '.join(self._defaults)}."])
        vars(self).update({**self._defaults, **given})

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(vars(self).items())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self)})"


def _invalid(section: str, key: str, value: object, problem: str) -> ValueError:
    """What DeepSpeed's sections raise: pydantic's error, which only a program with that package can know."""
    sentence = f"{section}.{key} {problem}"
    try:
        from pydantic_core import PydanticCustomError, ValidationError
    except ImportError:
        return ArgumentError(f"{sentence}, and is {value!r}.")
    problems: list[Any] = [{"type": PydanticCustomError("value_error", sentence), "loc": (key,), "input": value}]
    return ValidationError.from_exception_data(section, problems)


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    _title = "zero_optimization.offload_param"
    _defaults = _defaults_of("offload_param") | {"device": OffloadDeviceEnum.none}


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    _title = "zero_optimization.offload_optimizer"
    _defaults = _defaults_of("offload_optimizer") | {"device": OffloadDeviceEnum.none}

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing is pipelined."""
        return bool(vars(self)["pipeline_read"] or vars(self)["pipeline_write"])


class DeepSpeedZeroLeafModuleConfig(_Section):
    """The section ``leaf_module``: modules to mark (:mod:`gptpar.deepspeed.leaf_modules`); one name may be a text."""

    _title = "zero_optimization.leaf_module"
    _defaults = {
        "classes": DEFAULT_LEAF_MODULE_CLASSES,
        "names": DEFAULT_LEAF_MODULE_NAMES,
        "name_suffixes": DEFAULT_LEAF_MODULE_NAME_SUFFIXES,
    }
    classes: list[str]
    names: list[str]
    name_suffixes: list[str]

    def __init__(self, **given: Any):
        super().__init__(**given)
        for key, value in self:
            setattr(self, key, list(dict.fromkeys([value] if isinstance(value, str) else map(str, value))))


_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
)
"""Keys that may be written with ``stage3_`` before them."""


class DeepSpeedZeroConfig(_Section):
    """The section ``zero_optimization``; keys may have ``stage3_`` before them, deprecated ones are translated."""

    _title = "zero_optimization"
    _defaults = _defaults_of("zero_optimization") | {"stage": ZeroStageEnum.disabled}

    def __init__(self, **given: Any):
        aliases = {f"stage3_{key}": key for key in _STAGE3.split()}
        aliases["stage3_gather_fp16_weights_on_model_save"] = "gather_16bit_weights_on_model_save"
        given = {aliases.get(key, key): value for key, value in given.items()}
        for former, key in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if given.pop(former, None):
                given[key] = {"device": OffloadDeviceEnum.cpu}
        super().__init__(**given)
        own = vars(self)
        own["stage"] = ZeroStageEnum(own["stage"])
        if own["overlap_comm"] is None:
            own["overlap_comm"] = own["stage"] == ZeroStageEnum.weights
        for key, kind in (
            ("offload_param", DeepSpeedZeroOffloadParamConfig),
            ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
            ("leaf_module", DeepSpeedZeroLeafModuleConfig),
        ):
            if isinstance(own[key], Mapping):
                own[key] = kind(**own[key])


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section ``zero_optimization`` of a configuration; ``true`` is stage 1, as long ago."""
    section = param_dict.get("zero_optimization", {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))


class DeepSpeedFP16Config(_Section):
    """The section ``fp16``.

    Raises:
        ValueError: a number is none, or cannot be; pydantic's ValidationError where that package is, as DeepSpeed's.
    """

    _title = "fp16"
    _defaults = _defaults_of("fp16")
    enabled: bool
    loss_scale: float

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.loss_scale = self._number("loss_scale", float)
        for key in ("loss_scale_window", "min_loss_scale"):
            setattr(self, key, self._number(key, int))
            if self.enabled and not self.loss_scale and vars(self)[key] <= 0:
                raise _invalid(self._title, key, vars(self)[key], "must be above 0 where the loss scale is dynamic")
        if self.loss_scale < 0:
            raise _invalid(self._title, "loss_scale", self.loss_scale, "must be 0, which is dynamic, or above")

    def _number(self, key: str, kind: type[float]) -> Any:
        value = vars(self)[key]
        try:
            if not isinstance(value, bool) and math.isfinite(float(value)) and kind(value) == float(value):
                return kind(value)
        except (TypeError, ValueError):
            pass
        raise _invalid(self._title, key, value, "must be a number")

    def initial_dynamic_scale(self) -> int:
        """The first loss scale, where it is dynamic."""
        return 2 ** int(vars(self)["initial_scale_power"])


class DeepSpeedBF16Config(_Section):
    """The section ``bf16``."""

    _title = "bf16"
    _defaults = _defaults_of("bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16`` of a configuration."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a configuration, or ``bfloat16``, its former name."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))
