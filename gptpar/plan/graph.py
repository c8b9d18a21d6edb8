"""Whether a run launches a step as one CUDA graph; the run and its plan decide it alike. Pure."""

from __future__ import annotations

from gptpar.config import Config
from gptpar.config.checks.precision import graph_obstacles


def wants_graph(config: Config, data_parallel_size: int) -> bool:
    """Whether a run on a GPU uses a graph; with ``auto``, where nothing speaks against it.

    Under ZeRO-1 alone it is slower: a recorded step has to wait for all parameters to be gathered, while one that is
    launched bit by bit waits for each layer's.
    """
    if config.precision.cuda_graph != "auto":
        return config.precision.cuda_graph == "on"
    gathers = config.parallel.zero_stage == 1 and data_parallel_size > 1
    return not any(graph_obstacles(config, data_parallel_size)) and not (
        gathers and config.parallel.model_parallel_size == 1
    )
