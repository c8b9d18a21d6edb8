"""Speeds of GPUs and their connections: data sheets, and the fractions of them that are reached in practice. Pure.

The fractions and other constants are fitted to lines of ``benchmarks/*.jsonl`` (one H100, four H200, bf16, compiled
blocks), once for all layouts. Other GPUs are assumed to reach the same fractions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gptpar.errors import ConfigError
from gptpar.system.files import facts_in

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet.

    Attributes:
        device: what ``torch.cuda.get_device_name()`` says, for :func:`peak_flops`.
        memory: GiB that a process can use at most.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s in one direction to the other GPUs of a machine.
    """

    device: str
    memory: float
    memory_bandwidth: float
    link_bandwidth: float


_SHEETS = facts_in("gpus.toml", __file__)
GPUS = {name: Gpu(**sheet) for name, sheet in _SHEETS["gpus"].items()}


@dataclass(frozen=True)
class Sustained:
    """The fractions of a data sheet's figures that are reached, and costs that no data sheet lists.

    ``fragmentation`` is what the lines with reserved and allocated memory show; ``outside`` and ``host_process`` are
    assumptions. ``host_*`` and ``bus`` were measured by themselves, in steps of 0.35B to 15B parameters beside an H100
    and an H200 (one process on 16 cores of a Xeon), ``host_rate_together`` with two and four processes of 16 cores
    each. These are absolute figures, which differ between machines.

    Attributes:
        products: fraction of the dense peak in large matrix products; smaller products also lose time to memory
            traffic and ``kernel``.
        attention_forward: fraction of the peak in the attention kernel, on its causal half.
        attention_backward: the same in its backward.
        memory: fraction of the memory bandwidth in pointwise kernels, norms and the optimizer.
        on_chip: bytes/s, for each FLOP/s of the peak, at which a product's operands and results cost time on top of
            its arithmetic. They pass the caches, whose speed goes with the processors': an H100, with 70 % of an
            H200's memory bandwidth, multiplies as fast.
        link: fraction of a connection's bandwidth in collectives and sends.
        overlapped: what a transfer adds to a computation beside it, as a fraction of the transfer's time. It takes
            processors and memory bandwidth from the computation.
        kernel: seconds lost at the start and the end of each kernel on the device.
        transfer: seconds until a collective or a send starts beside kernels that fill the device.
        stage_transfer: the same for a send to a neighbouring stage, for which both sides must be ready. It is below the
            best fit (2 ms): the pipelines were measured before the kernels, which explains a part of the misfit.
        host_kernel: seconds in which the host launches one kernel of a block (without CUDA graph).
        host_collective: seconds in which it launches one collective.
        scheduling: fraction by which a pipeline is slower when its stages are launched one by one.
        fragmentation: memory that the allocator holds beyond the allocated memory, as a fraction of the latter.
        outside: bytes on the device outside of the allocator: context, kernels, NCCL's buffers.
        host_rate: bytes/s of host memory that each process's CPU optimizer reaches during a step, in place.
        host_rate_aside: the same while it writes the new state to double buffers, during the backward pass.
        host_rate_together: bytes/s that all CPU optimizers of a machine reach in place. If that is less than
            ``host_rate`` for each, ``host_rate_aside`` falls by the same factor.
        host_pause: seconds between two buckets of the CPU optimizer.
        bus: bytes/s in one direction between a GPU and its host (PCIe 5 x16).
        host_process: bytes of host memory of a process before it keeps anything.
        socket: bytes/s in one direction of a process's TCP connection through gloo, an assumption: single rounds of
            ``benchmarks/mirror_speed.py`` over loopback reached it on two busy cores.
    """

    products: float = 0.73
    attention_forward: float = 0.37
    attention_backward: float = 0.40
    memory: float = 0.90
    on_chip: float = 9.6e-3
    link: float = 0.70
    overlapped: float = 0.73
    kernel: float = 2.5e-6
    transfer: float = 45e-6
    stage_transfer: float = 1.6e-3
    host_kernel: float = 1.49e-3 / 31
    host_collective: float = 0.16e-3
    scheduling: float = 0.04
    fragmentation: float = 0.04
    outside: float = 1.5 * GIB
    host_rate: float = 150e9
    host_rate_aside: float = 135e9
    host_rate_together: float = 220e9
    host_pause: float = 0.1e-3
    bus: float = 48e9
    host_process: float = 3.0 * GIB
    socket: float = 1.1e9


SUSTAINED = Sustained()

BUS, BUS_BOTH_WAYS = 55e9, 89e9
"""Bytes/s between page-locked host memory and a GPU with PCIe 5 x16, measured beside an H100: one way, and the sum of
both ways at the same time."""


@dataclass(frozen=True)
class Cluster:
    """The machines for which a run is planned.

    Attributes:
        name: the GPU's name, as it is shown.
        peak: dense FLOP/s of a GPU in the run's number format.
        memory: bytes of a GPU that a process can use.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s in one direction between the GPUs of a machine.
        network_bandwidth: bytes/s in one direction between machines, for each GPU.
        gpus_per_node: GPUs in a machine.
        host_memory: bytes of a machine's memory; ``None``: unlimited.
        sustained: the fractions of these figures that are reached.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int
    host_memory: float | None = None
    sustained: Sustained = SUSTAINED

    def bandwidth(self, size: int, stride: int) -> float:
        """Sustained bytes/s of each member of a group of ``size`` ranks, each ``stride`` ranks after the one before.

        Between machines, a group uses the network bandwidth of all its members in a machine together.
        """
        if size * stride <= self.gpus_per_node:
            return self.sustained.link * self.link_bandwidth
        neighbours = max(1, self.gpus_per_node // stride)
        return self.sustained.link * min(self.link_bandwidth, neighbours * self.network_bandwidth)

    def stage_bandwidth(self, world_size: int) -> float:
        """Sustained bytes/s between neighbouring stages; if there are several machines, between two of these."""
        inside = world_size <= self.gpus_per_node
        return self.sustained.link * (self.link_bandwidth if inside else self.network_bandwidth)


def make_cluster(
    gpu: str,
    dtype: str,
    *,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    link_bandwidth: float | None = None,
    network_bandwidth: float = 50.0,
    host_bandwidth: float | None = None,
    gpus_per_node: int = 8,
) -> Cluster:
    """A cluster of one kind of GPU.

    Args:
        gpu: a name in ``GPUS``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        gpu_memory: GiB of a GPU, instead of the preset's.
        host_memory: GiB of a machine.
        link_bandwidth: GB/s between the GPUs of a machine, instead of the preset's.
        network_bandwidth: GB/s between machines for each GPU.
        host_bandwidth: GB/s of host memory that one process's CPU optimizer reaches, instead of
            :attr:`Sustained.host_rate`; the other rates of the host change by the same factor.
        gpus_per_node: GPUs in a machine.

    Raises:
        ConfigError: the GPU has no units for the number format.
    """
    sheet = GPUS[gpu]
    peak = peak_flops(sheet.device, dtype)
    if peak is None:
        raise ConfigError([f"--gpu {gpu} has no known speed in {dtype}: choose --bf16, --fp16, fp32 or another GPU."])
    faster = 1.0 if host_bandwidth is None else host_bandwidth * 1e9 / SUSTAINED.host_rate
    rates = ("host_rate", "host_rate_aside", "host_rate_together")
    return Cluster(
        name=gpu,
        peak=peak,
        memory=(gpu_memory or sheet.memory) * GIB,
        memory_bandwidth=sheet.memory_bandwidth,
        link_bandwidth=link_bandwidth * 1e9 if link_bandwidth else sheet.link_bandwidth,
        network_bandwidth=network_bandwidth * 1e9,
        gpus_per_node=gpus_per_node,
        host_memory=host_memory * GIB if host_memory else None,
        sustained=replace(SUSTAINED, **{name: faster * getattr(SUSTAINED, name) for name in rates}),
    )


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation as a fraction of ``peak`` FLOP/s; None where the peak is unknown."""
    return None if peak is None else tokens_per_s_per_gpu * flops_per_token / peak


_COLUMN = {"bf16": 0, "fp16": 1, "tf32": 2, "fp32": 3}
"""Number format -> its position in a row of ``peak_tflops`` in gpus.toml."""
_OTHER_VARIANTS = {"mig", "laptop", "max", "mobile", "d", "ti"}
"""Words of devices that share a GPU's name but not its speed: MIG slices, laptop chips, sister cards."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the device that ``torch.cuda.get_device_name()`` names.

    ``precision`` is the matrix products' type, "bf16", "fp16", "fp32", or "tf32" for fp32 training with
    TF32 products allowed. None for any other type, and for a device that is not in the table (a CPU, say)
    or has no units for the type; MFU is then not reported.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_VARIANTS or precision not in _COLUMN:
        return None
    for row, peaks in _SHEETS["peak_tflops"].items():
        if words.issuperset(row.split()):
            return peaks[_COLUMN[precision]] * 1e12 or None
    return None
