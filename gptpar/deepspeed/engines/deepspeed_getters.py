"""Attributes and getters that programs written for DeepSpeed ask of an engine, beside those that training needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from gptpar.deepspeed.engines.dataset import make_loader
from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.deepspeed.names import FACTS
from gptpar.deepspeed.settings import DeepSpeedConfig, value_in
from gptpar.errors import ConfigError
from gptpar.topology.mesh import DATA

_ZERO = "zero_optimization"
SETTINGS: Mapping[str, list[Any]] = FACTS["settings"]
"""Getter -> the configuration's key whose value it returns, and DeepSpeed's default."""

_NONE = "none"
"""The device of an offload section that is off."""


class DeepSpeedGetters(EngineState):
    """What programs ask of DeepSpeed's engine beside training: settings, places of processes, the module's attributes.

    A name that the engine does not have is looked up in the module, so that ``engine.generate`` and ``engine.config``
    work.
    """

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:
            return lambda: self._setting(*SETTINGS[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
            return getattr(module, name)

    def _setting(self, key: str, default: Any = None) -> Any:
        found = value_in(self.options.config, key)
        if key.startswith(_ZERO) and isinstance(found, Mapping):  # a section, whose keys are read as attributes
            return SimpleNamespace(**{"device": _NONE} | dict(found)) if found.get("device", _NONE) != _NONE else None
        return default if found is None else found

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return dict(self.options.config)

    @property
    def _config(self) -> DeepSpeedConfig:
        """The configuration as DeepSpeed's object."""
        return DeepSpeedConfig(self.options.config)

    @property
    def is_closed(self) -> bool:
        """Whether the module has its weights back."""
        return bool(self.__dict__.get("_closed"))

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules whose gradients are sparse: none."""
        return set()

    has_moe_layers = False
    """Whether a layer is DeepSpeed's ``MoE``."""

    def empty_partition_cache(self) -> None:
        """Nothing: a forward pass gives back what it gathered."""

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the backward pass sums gradients over processes where DeepSpeed's does."""

    # What is where.

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the CPU updates any parameters."""
        return self.options.offload.least_ratio > 0

    zero_cpu_offload = zero_use_cpu_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each process has a shard of the gradients."""
        return self.options.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each process has a shard of the parameters."""
        return self.options.zero_stage >= 3

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the parameters."""
        return self.options.dtype or next((p.dtype for p in self.module.parameters()), torch.float32)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The number formats of the parameters and of the sums of gradients."""
        settings = self.engine.settings
        return self.dtype, settings.wide if settings.adds_gradients else settings.dtype

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples of a step, samples of a micro-batch, micro-batches of a step)"""
        batch = self.options.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps

    # The other processes.

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The processes with the same layers and other micro-batches."""
        topology = self.topology
        return topology.group(DATA) or (dist.group.WORLD if dist.is_initialized() and self._is_flat else None)

    seq_data_parallel_group = data_parallel_group

    @property
    def _is_flat(self) -> bool:
        return self.topology.mesh.pipeline == 1

    def get_data_parallel_rank(self) -> int:
        """This process's number among those with other micro-batches."""
        return self.topology.position(DATA)

    def get_model_parallel_rank(self) -> int:
        """0: layers are not divided."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank
    mp_world_size = 1

    # Data.

    @property
    def training_dataloader(self) -> Iterable[Any] | None:
        """The loader of ``training_data``."""
        return self.data.loader

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this process's micro-batches of a data set.

        Args:
            dataset: has a length, unless there is one process.
            batch_size: samples of a micro-batch; default: the engine's.
            route: ``train`` (a new order in each epoch), ``eval`` or ``predict`` (the data set's order).
            pin_memory: without effect: micro-batches are in pinned memory where there is a GPU.
            data_sampler: the order, instead of these.
            collate_fn: makes a micro-batch of samples.
            num_local_io_workers: processes that load.
        """
        size = self.options.batch.micro_batch_size if batch_size is None else batch_size
        more: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_local_io_workers or 0}
        if data_sampler is not None:
            return DataLoader(dataset, size, sampler=data_sampler, pin_memory=torch.cuda.is_available(), **more)
        trains, place = route == "train", (self.topology.position(DATA), self.topology.mesh.data)
        options = self.options if trains else replace(self.options, drop_last=False)
        return make_loader(dataset, options, *place, micro_batch_size=size, shuffle=trains, **more)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let ``train_batch()`` without an argument take its micro-batches from an iterator, until it ends."""
        self.data.loader = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Let ``train_batch()`` without an argument take its micro-batches from a loader, without end."""
        self.data.loader = loader

    # The model's file.

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The module's whole state in host memory, on the first process; all call it, the others get ``None``."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.topology.is_main else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the module's whole state in the parameters' number format, as ``torch.save`` does; all call it.

        Returns:
            Whether it was saved: with ZeRO-3 only if the configuration has
            ``zero_optimization.stage3_gather_16bit_weights_on_model_save``, as in DeepSpeed.
        """
        if not self._is_flat:
            raise ConfigError(["save_16bit_model of a pipeline: no process has all layers; use save_checkpoint."])
        if self.options.zero_stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            return False
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model
