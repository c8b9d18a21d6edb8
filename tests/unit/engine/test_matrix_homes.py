"""Where matrices are orthogonalized: every element goes to one home, and each process expects what the others send."""

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch

from gptpar.engine import matrix_homes
from gptpar.engine.matrix_homes import MatrixChunk, MatrixJob, chunks_of
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.model.gpt import gpt_model
from gptpar.optim.parameter_groups import ParameterGroups
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import TensorAxis
from gptpar.topology.mesh import TENSOR, Mesh
from gptpar.topology.tensor_parts import views_of_flat
from tests.helpers import tiny_config

WORDS = (
    "--optimizer muon --num-layers 5 --hidden-size 48 --num-attention-heads 8 --ffn-hidden-size 96 --swiglu "
    "--num-query-groups 4 --position-embedding-type rope"
)
LAYOUTS = [
    *((Mesh(), 0), (Mesh(data=2), 0), (Mesh(data=2), 1), (Mesh(data=7), 3), (Mesh(tensor=2), 0)),
    *((Mesh(tensor=4), 0), (Mesh(data=2, tensor=2), 0), (Mesh(data=3, tensor=2), 2)),
]


@cache
def model_of(size: int, position: int) -> tuple[dict[str, Any], ParameterGroups]:
    config = tiny_config(WORDS)
    model = gpt_model(config.model, TensorAxis(size, position))
    return Stage(model.specs).infos_by_unit(), ParameterGroups(config.optimizer, config.model, model)


def chunks(mesh: Mesh, stage: int, rank: int) -> list[MatrixChunk]:
    infos, groups = model_of(mesh.tensor, mesh.position(rank, TENSOR))
    table = ParameterTable.of(infos, Place(mesh, rank, stage), group_of=groups.group_of)
    return chunks_of(table, groups.updates)


@pytest.mark.parametrize(("mesh", "stage", "small"), [*((*one, False) for one in LAYOUTS), (*LAYOUTS[-1], True)])
def test_each_element_has_one_home(mesh: Mesh, stage: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setattr(matrix_homes, "CHUNK_ELEMENTS", 1)
    size = mesh.size(*(("data",) if stage else ()), TENSOR)
    of_rank = [chunks(mesh, stage, rank) for rank in range(mesh.world_size)]
    names = [[unit.name for chunk in found for unit in chunk.units] for found in of_rank]
    assert names == [[f"layers.{number}" for number in range(5)]] * mesh.world_size
    for same in zip(*of_rank, strict=True):
        assert {chunk.size for chunk in same} == {size}
        assert len(same[0].units) <= (size if small else 5)
        covered: dict[str, torch.Tensor] = {}
        for job in same[0].jobs:
            counts = covered.setdefault(job.param.name, torch.zeros(job.shape))
            for piece in job.pieces:
                ones = torch.ones(piece.stop - piece.first)
                for offsets, part in views_of_flat(piece.info.shape, piece.info.offsets, piece.first, piece.stop, ones):
                    counts[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] += part
        assert all((counts == 1).all() for counts in covered.values())
        assert len(covered) == 4 * len(same[0].units)


def told(job: MatrixJob) -> tuple[str, str]:
    return job.unit.name, job.param.name


@pytest.mark.parametrize(("mesh", "stage"), [(Mesh(data=3), 1), (Mesh(tensor=4), 0), (Mesh(data=2, tensor=2), 3)])
def test_what_is_sent_is_what_is_expected(mesh: Mesh, stage: int) -> None:
    for same in zip(*(chunks(mesh, stage, rank) for rank in range(mesh.world_size)), strict=True):
        messages: dict[tuple[int, int], list[object]] = defaultdict(list)
        expected: dict[tuple[int, int], list[object]] = defaultdict(list)
        for chunk in same:
            for home, job, piece in chunk.sent():
                messages[chunk.me, home].append((*told(job), piece.first, piece.stop))
            for member, job, piece in chunk.received():
                expected[member, chunk.me].append((*told(job), piece.first, piece.stop))
        assert messages == expected
        work = [sum(job.shape.numel() for job in chunk.jobs if job.home == chunk.me) for chunk in same]
        assert max(work) <= 1.7 * min(work), "homes share the work"


def test_ranks_that_hold_whole_matrices_do_them_alone() -> None:
    """Without ZeRO, processes of the data axis send each other nothing."""
    for rank in range(2):
        for chunk in chunks(Mesh(data=2), 0, rank):
            assert (chunk.size, chunk.axes) == (1, ()) and not any(job.is_duplicated for job in chunk.jobs)
