"""A plan's parameter table is the run's: the same units in the same order, cut at the same elements."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gptpar.engine.ranges import Home
from gptpar.engine.table import ParameterTable
from gptpar.plan.job import Job
from gptpar.run.gpt import make_engine
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import DATA, TENSOR, Mesh
from tests.helpers import tiny_config
from tests.unit.plan.plans import pretended_world

LLAMA = (
    "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear "
)
CUT = "--cpu-optimizer --cpu-optimizer-ratio 0.3 "


def tables_of_run(flags: str, mesh: Mesh) -> tuple[Job, list[ParameterTable]]:
    """The job, and of each stage the table of its first process."""
    sizes = f"--tensor-model-parallel-size {mesh.tensor} --pipeline-model-parallel-size {mesh.pipeline}"
    config = tiny_config(f"--num-layers 4 --no-compile {sizes} {flags}", mesh.world_size)
    tables: dict[int, ParameterTable] = {}
    for rank in range(mesh.world_size):
        with pretended_world(rank, mesh.world_size):
            topology = make_topology(mesh, rank, torch.device("cpu"))
            if topology.stage not in tables:
                assert topology.position(DATA) == topology.position(TENSOR) == 0
                tables[topology.stage] = make_engine(config, topology, tries_memory=True).engine.table
    return Job(config, mesh), [tables[stage] for stage in range(mesh.pipeline)]


def numbered_from_0(table: ParameterTable) -> dict[str, str]:
    """Unit -> its name where a stage's blocks are numbered from 0."""
    blocks = [unit.name for unit in table.units if unit.name.startswith("layers.")]
    new = {name: f"layers.{number}" for number, name in enumerate(blocks)}
    return {unit.name: new.get(unit.name, unit.name) for unit in table.units}


def described(table: ParameterTable) -> Iterator[tuple[Any, ...]]:
    """Each unit: its length, its shard's elements on the device, its parameters' places, and its ranges."""
    names = numbered_from_0(table)
    for unit in table.units:

        def local(param: str, unit: str = unit.name) -> str:
            return param.removeprefix(f"{unit}.")

        places = [(local(name), p.start, p.stop, p.end, p.longest, p.group) for name, p in unit.params.items()]
        ranges = [
            replace(one, unit="", param=local(one.param), counted=True)  # who counts tied copies no plan asks
            for one in table.ranges(unit=unit.name)
        ]
        yield names[unit.name], unit.length, unit.shards, table.on_device[unit.name], places, ranges


@pytest.mark.parametrize(
    ("mesh", "flags"),
    [
        (Mesh(tensor=2), CUT + "--sequence-parallel"),
        (Mesh(pipeline=2), CUT + LLAMA),
        (Mesh(pipeline=2), CUT + "--num-virtual-stages-per-pipeline-rank 2"),
        (Mesh(2, 2, 2), CUT + LLAMA + "--sequence-parallel --zero-stage 1"),
        (Mesh(2, 2, 1), CUT + "--sequence-parallel --qk-layernorm --zero-stage 3"),
        (Mesh(pipeline=2), CUT + "--weight-decay-override embedding*=0 *norm.weight=1 layers.2.mlp.*=0.5"),
        (Mesh(), CUT + "--mup --mup-base-hidden-size 8 --decoupled-lr 1e-3"),
    ],
)
def test_a_plan_has_the_table_of_each_stages_first_process(mesh: Mesh, flags: str) -> None:
    job, tables = tables_of_run(flags, mesh)
    for part, table in zip(job.stages, tables, strict=True):
        planned = job.table(part)
        assert list(described(planned)) == list(described(table))
        assert [planned.length(home) for home in Home] == [table.length(home) for home in Home]
        assert [planned.elements(home) for home in Home] == [table.elements(home) for home in Home]
