"""Layers that tensor parallelism can split."""

from gptpar.tensor_parallel.axis import ALONE, Split, TensorAxis, splits_of
from gptpar.tensor_parallel.collectives import symmetric_memory_works
from gptpar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = [
    "ALONE",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "Split",
    "TensorAxis",
    "VocabParallelEmbedding",
    "splits_of",
    "symmetric_memory_works",
]
