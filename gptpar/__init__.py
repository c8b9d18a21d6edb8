"""gptpar pretrains GPT models with data, tensor and pipeline parallelism and ZeRO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gptpar.errors import missing_package

if TYPE_CHECKING:
    from gptpar.adapter.deferred import deferred_init
    from gptpar.adapter.pipeline_module import PipelineModule
    from gptpar.deepspeed.engines.arguments import add_config_arguments
    from gptpar.deepspeed.engines.initialize import initialize
    from gptpar.deepspeed.memory_estimates import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
    from gptpar.offload.twin_flow import TwinFlowAdamW
    from gptpar.plan.module_memory import estimate_memory

__version__ = "0.1.0"
__all__ = [
    "LayerSpec",
    "PipelineModule",
    "TiedLayerSpec",
    "TwinFlowAdamW",
    "__version__",
    "add_config_arguments",
    "deferred_init",
    "estimate_memory",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "initialize",
]

_HOMES = {
    "add_config_arguments": "gptpar.deepspeed.engines.arguments",
    "initialize": "gptpar.deepspeed.engines.initialize",
    "LayerSpec": "gptpar.model.layer_spec",
    "PipelineModule": "gptpar.adapter.pipeline_module",
    "TiedLayerSpec": "gptpar.model.layer_spec",
    "TwinFlowAdamW": "gptpar.offload.twin_flow",
    "deferred_init": "gptpar.adapter.deferred",
    "estimate_memory": "gptpar.plan.module_memory",
    "estimate_zero2_model_states_mem_needs_all_cold": "gptpar.deepspeed.memory_estimates",
    "estimate_zero2_model_states_mem_needs_all_live": "gptpar.deepspeed.memory_estimates",
    "estimate_zero3_model_states_mem_needs_all_cold": "gptpar.deepspeed.memory_estimates",
    "estimate_zero3_model_states_mem_needs_all_live": "gptpar.deepspeed.memory_estimates",
}


def __dir__() -> list[str]:
    """Names for completion and ``help(gptpar)``, the lazy ones too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: preprocessing's workers, for one, need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gptpar' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error)) is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None
