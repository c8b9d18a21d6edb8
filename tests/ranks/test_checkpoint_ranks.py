"""Several processes (gloo): layouts, agreement on which checkpoint is good, and errors that reach every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gptpar.checkpoint import load_checkpoint, read_manifest, read_tensors, save_checkpoint, verify_checkpoint
from gptpar.errors import CheckpointError

Layout = dict[str, int | None]  # dim that is split over the two ranks; None: each rank holds all of it

SHAPES = {"even": (8, 6), "uneven": (5, 7), "short": (1, 3), "bf16": (9, 4), "norm": (33,), "big": (3, 1_000_003)}
BY_ROW: Layout = {"even": 0, "uneven": 0, "short": 0, "bf16": 0, "norm": None, "big": 0}
BY_COLUMN: Layout = {"even": 1, "uneven": 1, "short": 1, "bf16": 1, "norm": None, "big": 1}
WHOLE: Layout = dict.fromkeys(SHAPES)


def values(seed: float = 0) -> dict[str, torch.Tensor]:
    whole = {name: torch.arange(torch.Size(shape).numel()).view(shape) + seed for name, shape in SHAPES.items()}
    return {name: tensor.to(torch.bfloat16 if name == "bf16" else torch.float32) for name, tensor in whole.items()}


def spread(tensors: dict[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: tensor if layout[name] is None else distribute_tensor(tensor, mesh, [Shard(layout[name])])
        for name, tensor in tensors.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def in_two_processes(body: Callable[[int, Path], None], root: Path) -> None:
    mp.spawn(_run, args=(body, root), nprocs=2)


def _run(rank: int, body: Callable[[int, Path], None], root: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    try:
        body(rank, root)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def reshard(rank: int, root: Path) -> None:
    for iteration, layout in enumerate([BY_ROW, BY_COLUMN, WHOLE]):
        saved = spread(values(), layout)
        saved[f"stage{rank}"] = torch.full((4,), float(rank))  # each rank has a name of its own
        save_checkpoint(root, iteration, saved, {"layout": iteration})
        for other in (BY_ROW, BY_COLUMN, WHOLE):
            wanted = spread(values(), other)
            targets = empty_like(wanted) | {f"stage{rank}": torch.zeros(4)}
            assert load_checkpoint(root, targets).iteration == iteration
            for name in wanted:
                assert torch.equal(local(targets[name]), local(wanted[name])), (iteration, name)
            assert targets[f"stage{rank}"].tolist() == [rank] * 4
    # Two mesh axes at once, and a tensor without elements.
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    shards = distribute_tensor(torch.arange(3.0), mesh, [Replicate(), Shard(0)])
    save_checkpoint(root, 9, {"w": shards, "e": distribute_tensor(torch.empty(0, 2), mesh["tp"], [Shard(0)])}, {})
    assert verify_checkpoint(root / "iter_0000009") == []


def test_any_layout_loads_into_any_other(tmp_path: Path) -> None:
    in_two_processes(reshard, tmp_path)
    for iteration in range(3):  # and into one process without a group
        path = tmp_path / f"iter_{iteration:07d}"
        whole = read_tensors(path)
        targets = empty_like(whole)
        assert load_checkpoint(tmp_path, targets, iteration=iteration).meta == {"layout": iteration}
        for name, tensor in values().items():
            assert torch.equal(whole[name], tensor) and torch.equal(targets[name], tensor)
        sizes = [(path / f"rank0000{rank}.bin").stat().st_size for rank in (0, 1)]
        assert sum(sizes) == read_manifest(path).nbytes and min(sizes) > 0  # replicas are stored once, on both ranks
    assert read_tensors(tmp_path / "iter_0000009")["w"].tolist() == [0, 1, 2]


def fail_in_turn(rank: int, root: Path) -> None:
    save_checkpoint(root, 1, spread(values(), BY_ROW), {})
    dist.barrier()

    def must_fail(saved: dict[str, torch.Tensor], message: str, iteration: int = 2) -> None:
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(root, iteration, saved, {})
        assert time.monotonic() - start < 5
        dist.barrier()
        assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000001"]

    must_fail({"a": torch.ones(1, dtype=torch.complex64 if rank else torch.float32)}, "complex64")
    must_fail({"a": torch.ones(2 + rank)}, r"ranks disagree about tensor 'a'.*\[3\] on rank 1.*\[2\] on rank 0")
    real = os.pwrite
    if rank == 1:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    must_fail(spread(values(), BY_ROW), "rank00001.bin: No space left on device")
    os.pwrite = real

    targets = {"a": torch.zeros(1)} if rank else empty_like(values())
    with pytest.raises(CheckpointError, match="tensor 'a' is not in the checkpoint"):
        load_checkpoint(root, targets)


def fall_back_together(rank: int, root: Path) -> None:
    for iteration in (1, 2):
        save_checkpoint(root, iteration, spread(values(iteration), BY_ROW), {}, keep=2)
    if rank == 0:  # only rank 1 reads this byte
        file = root / "iter_0000002" / "rank00001.bin"
        data = bytearray(file.read_bytes())
        data[-1] ^= 128
        file.write_bytes(data)
    dist.barrier()
    said: list[str] = []
    targets = empty_like(spread(values(), BY_ROW))
    loaded = load_checkpoint(root, targets, report=said.append)
    wanted = spread(values(1), BY_ROW)
    assert loaded.iteration == 1 and "rank00001.bin: tensor" in loaded.skipped[0]
    assert all(torch.equal(local(targets[name]), local(wanted[name])) for name in wanted)
    assert len(said) == (1 if rank == 0 else 0)
    # The damaged one does not count as whole, so keep=1 spares what else there is until a newer one is proved.
    save_checkpoint(root, 2, spread(values(2), BY_ROW), {}, keep=1, report=said.append)
    assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000002", "iter_0000002.damaged-1"]


def fail_then_fall_back(rank: int, root: Path) -> None:
    fail_in_turn(rank, root / "fail")
    fall_back_together(rank, root / "fall_back")


def test_one_ranks_error_or_damage_is_everyones(tmp_path: Path) -> None:
    in_two_processes(fail_then_fall_back, tmp_path)  # one start of two processes costs more than all their work
