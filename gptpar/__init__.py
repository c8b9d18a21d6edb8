"""gptpar pretrains GPT models with data, tensor and pipeline parallelism and ZeRO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptpar.any_module.deferred import deferred_init
    from gptpar.any_module.initialize import initialize
    from gptpar.layer_spec import LayerSpec, TiedLayerSpec
    from gptpar.offload.twin_flow import TwinFlowAdamW
    from gptpar.pipeline import PipelineModule

__version__ = "0.1.0"
__all__ = [
    "LayerSpec",
    "PipelineModule",
    "TiedLayerSpec",
    "TwinFlowAdamW",
    "__version__",
    "deferred_init",
    "initialize",
]

_HOMES = {
    "initialize": "gptpar.any_module.initialize",
    "LayerSpec": "gptpar.layer_spec",
    "PipelineModule": "gptpar.pipeline",
    "TiedLayerSpec": "gptpar.layer_spec",
    "TwinFlowAdamW": "gptpar.offload.twin_flow",
    "deferred_init": "gptpar.any_module.deferred",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: preprocessing's workers, for one, need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gptpar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
