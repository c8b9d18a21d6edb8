"""Replaces ``auto`` by what fits the GPU, for ``--cpu-optimizer-ratio`` and ``--offload-gradients``."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gptpar.config import Config
from gptpar.config.fields import Derived
from gptpar.data.loader import MicroBatch
from gptpar.offload.copying_transfers import max_bytes_waiting
from gptpar.optim.schedule import make_schedule
from gptpar.plan.gradients import choose_gradients
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.job import Job
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology

KEPT_FREE = 0.05
"""Part of the GPU's memory that is left to fragmentation, NCCL and whoever else."""


def with_ratio(config: Config, topology: Topology) -> Config:
    """Replace the ratio ``auto`` by the smallest one with which the rest fits the GPU; without a GPU by 0.

    All processes must call it.
    """
    if config.offload.ratio != "auto":
        return config
    ratio = 0.0
    if topology.device.type == "cuda":
        ratio = _measured(config, topology)
    if topology.mesh.world_size > 1:
        highest = torch.tensor(ratio, device=topology.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        ratio = highest.item()
    return config.update("offload", cpu_optimizer_ratio=round(ratio, 3))


def smallest_ratio(free: int, sizes: Sequence[tuple[int, int]], saved: int = 0) -> float:
    """The host's share when the device has ``free`` bytes for the optimizer: 0 to 1, in steps of 0.001.

    Args:
        sizes: (number of elements, bytes of each of them) in the order in which the device takes them.
        saved: bytes that the device needs less if the host has nothing.
    """
    if sum(count * size for count, size in sizes) <= free + saved:
        return 0.0
    elements, on_device, left = sum(count for count, _ in sizes), 0, max(0, free)
    for count, size in sizes:
        fitting = min(count, left // size)
        on_device, left = on_device + fitting, left - fitting * size
        if fitting < count:
            break
    return -(-(elements - on_device) * 1000 // max(1, elements)) / 1000


def _measured(config: Config, topology: Topology) -> float:
    """Try the passes of a step with nothing of the optimizer on the device, and see what is left."""
    device = topology.device
    torch.cuda.reset_peak_memory_stats(device)
    trial = config.update("offload", cpu_optimizer_ratio=1.0)
    trainer = Trainer(trial, topology, make_schedule(trial, 0), tries_memory=True)
    trainer.initialise()
    trainer.forward_backward(any_batches(config, topology), 0)
    table, bytes_of = trainer.engine.table, trainer.engine.optimizer.bytes_of
    sizes = [(one.length, bytes_of(one.group)) for one in table.ranges()]
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) + _bytes_waiting(trainer)
    saved = bytes_saved_without_host(trainer)
    foreign = torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]
    foreign -= torch.cuda.memory_reserved(device)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    capacity = torch.cuda.mem_get_info(device)[1] * (1 - KEPT_FREE)
    return smallest_ratio(int(capacity) - foreign - peak, sizes, saved)


def bytes_saved_without_host(trainer: Trainer) -> int:
    """Model parameters that are also the master weights if nothing is offloaded, and are separate from them otherwise.

    Several processes take the highest ratio, which may be above 0 where 0 would fit one of them: they count on nothing.
    """
    topology = trainer.topology
    nothing = Job(trainer.config.update("offload", cpu_optimizer_ratio=0.0), topology.mesh)
    alone = topology.mesh.world_size == 1
    return trainer.engine.parameters.everything.nbytes if alone and nothing.masters_are_parameters else 0


def _bytes_waiting(trainer: Trainer) -> int:
    """Gradients that wait for their copies, where they leave at once: in the trial they are dropped."""
    if not trainer.config.offload.gradients_leave_at_once:
        return 0
    lengths = [unit.shard_length for unit in trainer.engine.table.units]
    return max_bytes_waiting(lengths, trainer.engine.optimizer.grad.element_size())


def any_batches(config: Config, topology: Topology) -> list[MicroBatch]:
    """Micro-batches of arbitrary tokens: as many as are ever alive at once, and at least two if a step sums several."""
    model, batch = config.model, config.batch
    count = batch.global_batch_size // (batch.micro_batch_size * topology.mesh.data)
    enough = min(count, topology.mesh.pipeline * config.parallel.num_virtual_stages * 2)
    shape = batch.micro_batch_size, model.seq_length
    # Different tokens: equal ones would all go to the same experts.
    tokens = torch.arange(math.prod(shape)).remainder(max(1, model.softmax_vocab_size)).view(shape)
    starts = torch.arange(0, tokens.numel() + 1, model.seq_length, dtype=torch.int32)
    cu_seqlens = starts if config.data.reset_attention_mask else None
    return [MicroBatch(tokens, tokens, cu_seqlens=cu_seqlens) for _ in range(max(min(2, count), enough))]


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
