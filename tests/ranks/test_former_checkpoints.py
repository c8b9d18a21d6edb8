"""Checkpoints that a former version wrote load into other layouts: the same bits, and the same steps after them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptpar.topology.mesh import Mesh
from tests.fixtures.write_checkpoints import CASES, HERE, steps_after
from tests.spawn import spawn

OFFLOAD = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio"
# Case, layout, flags, largest relative difference of losses and of gradient norms of the steps after.
INTO: list[tuple[str, Mesh, str, float]] = [
    ("bf16-zero3-cpu", Mesh(), "", 1e-5),
    ("bf16-zero3-cpu", Mesh(), f"--bf16 {OFFLOAD} 0.7", 5e-3),
    ("bf16-zero3-cpu", Mesh(tensor=2), "--sequence-parallel", 1e-5),
    ("fp32-tied-tp2-pp2", Mesh(), f"{OFFLOAD} 1 --cpu-parameters", 1e-5),
    ("fp32-tied-tp2-pp2", Mesh(data=2), f"--zero-stage 3 {OFFLOAD} 0.4", 1e-5),
    ("fp32-tied-tp2-pp2", Mesh(pipeline=2), "--num-virtual-stages-per-pipeline-rank 2", 1e-5),
    ("fp64-llama-zero2-tp2", Mesh(), "--fp64 --recompute-granularity full", 1e-10),
    ("fp64-llama-zero2-tp2", Mesh(tensor=2), "--fp64", 1e-10),
    ("fp64-llama-zero2-tp2", Mesh(pipeline=2), "--fp64 --cpu-optimizer --cpu-optimizer-ratio 0.6", 1e-10),
]
Found = tuple[dict[str, str], list[Any]]


def go_on(rank: int, processes: int, folder: Path) -> list[Found]:
    """All cases of so many processes in turn."""
    mine = [(name, mesh, flags) for name, mesh, flags, _ in INTO if mesh.world_size == processes]
    return [steps_after(rank, mesh, f"{CASES[name][1]} {flags}", folder / name) for name, mesh, flags in mine]


@pytest.fixture(scope="module")
def outcomes() -> list[Found]:
    """Of all cases, in their order."""
    found = {count: iter(spawn(go_on, count, count, HERE, timeout_s=300)[0]) for count in (1, 2)}
    return [next(found[mesh.world_size]) for _, mesh, *_ in INTO]


@pytest.mark.parametrize("number", range(len(INTO)), ids=[f"{i[0]} {i[1].describe()} {i[2]}" for i in INTO])
def test_former_checkpoint(outcomes: list[Found], number: int) -> None:
    name, *_, tolerance = INTO[number]
    expected = json.loads((HERE / name / "expected.json").read_text())
    hashes, steps = outcomes[number]
    assert hashes == expected["sha256"]
    assert len(steps) == len(expected["steps"])
    for step, wanted in zip(steps, expected["steps"], strict=True):
        assert step == pytest.approx(wanted, rel=tolerance)
