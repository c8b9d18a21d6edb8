"""``--offload-gradients``: what cannot be, and what ``auto`` decides."""

from typing import Any

import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.sections.precision import graph_obstacles
from gptpar.config.validate import derive, find_problems, resolve
from gptpar.errors import ConfigError
from gptpar.offload import build, machine
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.machine import build_host_optimizer
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.job import Job
from gptpar.plan.memory import activations_on_host
from gptpar.run.auto_offload import available_memory, with_gradients
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import TINY, make_trainer, tiny_config
from tests.unit.offload.tiny_runs import ALL


@pytest.mark.parametrize(
    ("flags", "world_size", "told"),
    [
        ("--offload-gradients on", 1, "--offload-gradients needs --cpu-optimizer."),
        (
            f"{ALL} --offload-gradients on --log-num-zeros-in-grad",
            2,
            "--offload-gradients on: --log-num-zeros-in-grad counts zeros of sums on the GPU",
        ),
        (f"{ALL} --offload-gradients on --cuda-graph on", 1, "--cuda-graph on: --offload-gradients on gives back"),
    ],
)
def test_what_cannot_be_is_told(flags: str, world_size: int, told: str) -> None:
    parsed = parse_flags([*TINY.split(), *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(parsed, world_size)
    assert told in str(caught.value)


def test_auto_is_decided_by_the_memory_that_is_free_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = f"--bf16 {ALL} --num-layers 12 --hidden-size 512"
    gpu, cpu = (Topology(Mesh(), 0, torch.device(name)) for name in ("cuda", "cpu"))
    context = 1 << 29
    for memory, word in ((8 << 30, "off"), (2 << 30, "off"), (1 << 30, "on")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, memory=memory: (memory - context, memory))
        config, (told,) = with_gradients(tiny_config(wide), gpu)
        assert (told.name, told.value, config.offload.offload_gradients) == ("offload gradients", word, word)
        needed, there = told.reason.split(" are expected to be needed with all gradients on the GPU, and ")
        assert 1.5 < float(needed.split()[0]) < 1.8 and there == f"{memory >> 30}.00 GiB are available"
        for flags in ("--offload-gradients on", "--offload-gradients off", "--cuda-graph on"):
            given = tiny_config(f"{wide} {flags}")
            assert with_gradients(given, gpu) == (given, [])
    given = tiny_config(wide)
    assert with_gradients(given, cpu) == (given, []) and not given.offload.gradients_leave_at_once


def test_other_processes_memory_is_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB 70 are in use: 2 are tensors of this process, what is expected of a context is its own, too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    assert available_memory(torch.device("cuda")) == (12 << 30) + SUSTAINED.outside


def test_auto_keeps_step_graphs_and_on_switches_them_off() -> None:
    for word, obstacles in (("auto", 0), ("off", 0), ("on", 1)):
        flags, _ = derive(parse_flags(f"{TINY} {ALL} --offload-gradients {word}".split()).flags, 1)
        assert len(list(graph_obstacles(flags, 1))) == obstacles and not find_problems(flags, 1)


def test_the_room_for_speculation_counts_activations_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two blocks save takes the place of double buffers of 12 bytes an element."""
    rooms: list[int] = []

    def speculated(*args: Any, **kwargs: Any) -> HostOptimizer:
        rooms.append(kwargs["speculated_elements"])
        return build_host_optimizer(*args, **kwargs)

    monkeypatch.setattr(build, "build_host_optimizer", speculated)
    flags = f"{ALL} --num-layers 4"
    monkeypatch.setattr(machine, "available_memory", lambda: RING_BYTES * 10 // 9 + 1_000_000)
    away = tiny_config(f"{flags} --cpu-offloading-num-layers 2")
    for one in (tiny_config(flags), away):
        make_trainer(one).close()
    saved = activations_on_host(Job(away, Mesh()), 0)
    assert rooms[0] - rooms[1] == pytest.approx(saved / 12, abs=2) and 0 < rooms[1] < rooms[0]
