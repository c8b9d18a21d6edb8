"""Tensor parallelism: linear and embedding layers that are split over the tensor axis, and their transfers."""

from gptpar.tensor_parallel.axis import ALONE, TensorAxis, symmetric_memory_works
from gptpar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = [
    "ALONE",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorAxis",
    "VocabParallelEmbedding",
    "symmetric_memory_works",
]
