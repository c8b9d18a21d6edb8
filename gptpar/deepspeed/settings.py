"""``DeepSpeedConfig``: a configuration that was read, with the batch's three numbers filled in."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gptpar.adapter.options import read_options
from gptpar.config.deepspeed_reader import read_file
from gptpar.deepspeed.names import FACTS
from gptpar.errors import ConfigError

_KEYS: Mapping[str, list[Any]] = FACTS["settings"] | FACTS["config"]
"""Attribute of a DeepSpeedConfig -> the key whose value it is, and DeepSpeed's default."""


class DeepSpeedConfig:
    """Reads a configuration as ``initialize`` does.

    Args:
        config: a path, a dictionary, or JSON in base 64.
        mpu: has ``get_data_parallel_world_size()``; default: the number of processes.

    Attributes:
        raw: the configuration as a dictionary.
        gradient_allreduce_op: ``mean`` or ``sum``.

    Raises:
        ConfigError: something is wrong; it names all problems.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None):
        self.raw = _raw(config)
        self.gradient_allreduce_op = str(value_in(self.raw, "gradient_allreduce_op", "mean")).lower()
        if self.gradient_allreduce_op not in ("mean", "sum"):
            raise ConfigError([f"Invalid gradient_allreduce_op {self.gradient_allreduce_op!r}: it is mean or sum."])
        world = mpu.get_data_parallel_world_size() if mpu is not None else None
        self._world = world or (dist.get_world_size() if dist.is_initialized() else 1)

    def __getattr__(self, name: str) -> Any:
        """``train_batch_size`` and the others of the batch; else a key of the configuration."""
        if name.startswith("__") or name in ("raw", "_world"):
            raise AttributeError(name)
        batch = {
            "train_batch_size": "train_batch_size",
            "train_micro_batch_size_per_gpu": "micro_batch_size",
            "gradient_accumulation_steps": "accumulation_steps",
        }
        if name in batch:
            return getattr(read_options(self.raw, world=self._world).batch, batch[name])
        if name in self.raw:
            return self.raw[name]
        if name in _KEYS:
            return value_in(self.raw, *_KEYS[name])
        raise AttributeError(f"the configuration has no {name!r}; engine.train_batch_size() and the like read it")


def value_in(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A key's value, or the default; ``section.key`` is in a section."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return default if found is None else found


def _raw(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str) and not os.path.exists(config):
        try:
            return json.loads(base64.urlsafe_b64decode(config))
        except ValueError:
            raise ConfigError([f"{config} is neither a file nor a configuration in base 64."]) from None
    return read_file(os.fspath(config))


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.load(file, object_pairs_hook=...)``.

    Raises:
        ConfigError: a key is there twice.
    """
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ConfigError([f"the configuration has {', '.join(twice)} more than once: leave one of them out."])
    return dict(ordered_pairs)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """A key's value, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """The level of DeepSpeed's logger, such as ``WARNING``; ``None``: it stays."""
    return get_scalar_param(param_dict, "log_level", None)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The largest gradient norm that is not clipped; 0: gradients are never clipped."""
    return get_scalar_param(param_dict, "gradient_clipping", FACTS["constants"]["GRADIENT_CLIPPING_DEFAULT"])
