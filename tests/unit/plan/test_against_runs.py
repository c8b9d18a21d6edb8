"""What a plan says of a run's state is what the run has: the table of its parameters, and bytes on the device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gptpar.engine.engine import Engine
from gptpar.engine.ranges import Home
from gptpar.engine.table import ParameterTable
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.run.gpt import make_engine, split_of
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import DATA, TENSOR, Mesh
from tests.helpers import tiny_config
from tests.unit.plan.plans import pretended_world

LLAMA = (
    "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear "
)
CUT = "--num-layers 4 --cpu-optimizer --cpu-optimizer-ratio 0.3 "


def described(table: ParameterTable) -> Iterator[tuple[Any, ...]]:
    """Each unit: its length, its shard's elements on the device, its parameters' places, and its ranges.

    A stage's blocks are numbered from 0.
    """
    blocks = [unit.name for unit in table.units if unit.name.startswith("layers.")]
    numbered = {name: f"layers.{number}" for number, name in enumerate(blocks)}
    for unit in table.units:

        def local(param: str, unit: str = unit.name) -> str:
            return param.removeprefix(f"{unit}.")

        places = [(local(name), p.start, p.stop, p.end, p.longest, p.group) for name, p in unit.params.items()]
        ranges = [
            replace(one, unit="", param=local(one.param), counted=True)  # who counts tied copies no plan asks
            for one in table.ranges(unit=unit.name)
        ]
        name = numbered.get(unit.name, unit.name)
        yield name, unit.length, unit.shards, table.on_device[unit.name], places, ranges


def allocated(engine: Engine) -> tuple[int, int, int]:
    """Bytes of live parameters, gradient sums, and optimizer state."""

    def bytes_of(*groups: list[torch.Tensor]) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for g in groups for t in g}
        return sum(size for address, size in storages.items() if address)

    engine.publish()  # ZeRO-3 releases what it has shown
    optimizer = list(engine.optimizer.vectors.values())
    masters = {optimizer[0].untyped_storage().data_ptr()}
    live = [*engine.parameters.full.values(), *engine.parameters.shards.values()]
    live = [t for t in live if t.untyped_storage().data_ptr() not in masters]
    return bytes_of(live), bytes_of(engine.gradients.memory.tensors), bytes_of(optimizer)


@pytest.mark.parametrize(
    ("mesh", "flags"),
    [
        (Mesh(), "--bf16"),
        (Mesh(), "--bf16 --global-batch-size 4"),
        (Mesh(), "--cpu-optimizer --cpu-optimizer-ratio 0"),
        *((Mesh(data=2), f"--bf16 --zero-stage {stage}") for stage in range(4)),
        (Mesh(2, 2, 2), "--bf16 --zero-stage 1 --sequence-parallel"),
        (Mesh(2, 2, 2), "--zero-stage 3 --untie-embeddings-and-output-weights --swiglu"),
        (Mesh(1, 1, 2), "--bf16 --num-virtual-stages-per-pipeline-rank 2 --pipeline-partition-method flops"),
        (Mesh(tensor=2), CUT + "--sequence-parallel"),
        (Mesh(pipeline=2), CUT + LLAMA),
        (Mesh(pipeline=2), CUT + "--num-virtual-stages-per-pipeline-rank 2"),
        (Mesh(2, 2, 2), CUT + LLAMA + "--sequence-parallel --zero-stage 1"),
        (Mesh(2, 2, 1), CUT + "--sequence-parallel --qk-layernorm --zero-stage 3"),
        (Mesh(pipeline=2), CUT + "--weight-decay-override embedding*=0 *norm.weight=1 layers.2.mlp.*=0.5"),
        (Mesh(), CUT + "--mup --mup-base-hidden-size 8 --decoupled-lr 1e-3"),
    ],
)
def test_states_are_those_of_the_run(mesh: Mesh, flags: str) -> None:
    """The table of each stage's first process; bytes of each process, where all is on the device."""
    sizes = f"--tensor-model-parallel-size {mesh.tensor} --pipeline-model-parallel-size {mesh.pipeline}"
    config, is_cut = tiny_config(f"{flags} {sizes} --no-compile", mesh.world_size), flags.startswith(CUT)
    job = Job(config, mesh)
    assert job.split == split_of(config, mesh)
    for rank in range(mesh.world_size):
        with pretended_world(rank, mesh.world_size):
            topology = make_topology(mesh, rank, torch.device("cpu"))
            engine = make_engine(config, topology, tries_memory=is_cut).engine
            memory, planned = stage_memory(job, topology.stage), job.table(job.stages[topology.stage])
            if not is_cut:
                assert allocated(engine) == (memory.parameters, memory.gradients, memory.optimizer)
        if topology.position(DATA) == topology.position(TENSOR) == 0:
            assert list(described(planned)) == list(described(engine.table))
            for home in Home:
                assert planned.length(home) == engine.table.length(home)
                assert planned.elements(home) == engine.table.elements(home)
