"""Checkpoints that a former version wrote load into other layouts: the same bits, and the same steps after them."""

import json
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


def go_on(rank: int, processes: int) -> list[tuple[dict[str, str], list[Any]]]:
    """All cases of so many processes in turn."""
    mine = [(name, mesh, flags) for name, mesh, flags, _ in INTO if mesh.world_size == processes]
    return [steps_after(rank, mesh, f"{CASES[name][1]} {flags}", HERE / name) for name, mesh, flags in mine]


@pytest.mark.parametrize("processes", [1, 2])
def test_former_checkpoints(processes: int) -> None:
    mine = [(name, flags, tolerance) for name, mesh, flags, tolerance in INTO if mesh.world_size == processes]
    found = spawn(go_on, processes, processes, timeout_s=300)[0]
    for (name, flags, tolerance), (hashes, steps) in zip(mine, found, strict=True):
        expected = json.loads((HERE / name / "expected.json").read_text())
        assert hashes == expected["sha256"], (name, flags)
        for step, wanted in zip(steps, expected["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=tolerance), (name, flags)
