"""``deepspeed.runtime.zero.config``: sections of the configuration as objects, with DeepSpeed's defaults."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from gptpar.errors import ConfigError

_EXPERT_BLOCKS = tuple(
    f"transformers.models.{model}.modeling_{model}.{name}SparseMoeBlock"
    for model, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
)
"""The classes that DeepSpeed marks unless it is told others."""


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


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    _title = "zero_optimization.offload_param"
    _defaults = {
        "device": OffloadDeviceEnum.none,
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 10**8,
        "max_in_cpu": 10**9,
        "pin_memory": True,
    }


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    _title = "zero_optimization.offload_optimizer"
    _defaults = {
        "device": OffloadDeviceEnum.none,
        "nvme_path": None,
        "buffer_count": 4,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing is pipelined."""
        return bool(vars(self)["pipeline_read"] or vars(self)["pipeline_write"])


class DeepSpeedZeroLeafModuleConfig(_Section):
    """The section ``leaf_module``: modules to mark (:mod:`gptpar.deepspeed.leaf_modules`); one name may be a text."""

    _title = "zero_optimization.leaf_module"
    _defaults = {"classes": _EXPERT_BLOCKS, "names": (), "name_suffixes": ()}

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
    _defaults = {
        "stage": ZeroStageEnum.disabled,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5 * 10**8,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 5 * 10**8,
        "overlap_comm": None,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "offload_param": None,
        "offload_optimizer": None,
        "zenflow": None,
        "sub_group_size": 10**9,
        "cpu_offload_use_pin_memory": None,
        "prefetch_bucket_size": 5 * 10**7,
        "param_persistence_threshold": 10**5,
        "model_persistence_threshold": sys.maxsize,
        "max_live_parameters": 10**9,
        "max_reuse_distance": 10**9,
        "gather_16bit_weights_on_model_save": False,
        "module_granularity_threshold": 0,
        "use_all_reduce_for_fetch_params": False,
        "allgather_sequential": False,
        "ignore_unused_parameters": True,
        "legacy_stage1": False,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "zeropp_loco_param": None,
        "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
        "leaf_module": {},
    }

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
