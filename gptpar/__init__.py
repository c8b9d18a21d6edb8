"""gptpar pretrains GPT models with data, tensor and pipeline parallelism, ZeRO and exact CPU offload."""

from gptpar.layer_spec import LayerSpec, TiedLayerSpec

__version__ = "0.1.0"
__all__ = ["LayerSpec", "TiedLayerSpec", "__version__"]
