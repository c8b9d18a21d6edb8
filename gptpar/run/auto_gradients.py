"""Decides ``--offload-gradients auto`` on the GPU that is there."""

from __future__ import annotations

import torch

from gptpar.config import Config
from gptpar.config.derive import Derived
from gptpar.plan.gradients import choose_gradients
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.job import Job
from gptpar.topology.groups import Topology


def with_gradients(config: Config, topology: Topology) -> tuple[Config, list[Derived]]:
    """Replace ``auto`` by ``on`` or ``off``, and say why; a CPU keeps them.

    Processes need not agree: with several of them, gradients stay.

    Args:
        config: resolved, with the padded vocabulary filled.
    """
    choice, device = None, topology.device
    if device.type == "cuda":
        choice = choose_gradients(Job(config, topology.mesh), available_memory(device))
    if choice is None:
        return config, []
    config = choice.applied_to(config)
    return config, [Derived("offload gradients", config.offload.offload_gradients, choice.reason)]


def available_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process can have: what is free and what it holds already, its context included.

    A prediction counts the context. No call says how large it is: beyond what is expected, memory in use counts as
    other processes'.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + round(SUSTAINED.outside)
    return free + min(total - free, own)
