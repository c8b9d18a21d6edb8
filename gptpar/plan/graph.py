"""Decides whether a step is launched as one CUDA graph; the run and its plan both ask here. Pure."""

from __future__ import annotations

from gptpar.config import Config
from gptpar.config.sections.precision import graph_obstacles


def wants_graph(config: Config, num_copies: int) -> bool:
    """Whether a run on a GPU uses a graph. With ``auto`` it does if there is no obstacle and a graph is not slower.

    Under ZeRO-1 alone a graph is slower: a recorded step has to wait until all parameters are gathered, while one whose
    kernels are launched one by one waits for each layer's parameters. With experts it has not been measured.
    """
    if config.precision.cuda_graph != "auto" or config.model.has_experts:
        return config.precision.cuda_graph == "on"
    gathers = config.parallel.zero_stage == 1 and num_copies > 1
    return not any(graph_obstacles(config, num_copies)) and not (gathers and config.parallel.model_parallel_size == 1)
