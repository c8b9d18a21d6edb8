"""Several processes (gloo): layouts, agreement on which checkpoint is good, and errors that reach every rank."""

import os
import random
import time
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gptpar.checkpoint import load_checkpoint, read_manifest, read_tensors, save_checkpoint, verify_checkpoint
from gptpar.errors import CheckpointError
from gptpar.topology.tensor_parts import TensorParts, as_parts
from tests.flat_parts import parts_of_flat
from tests.spawn import spawn

Tensors = dict[str, torch.Tensor | TensorParts]

SHAPES = {"even": (8, 6), "uneven": (5, 7), "short": (1, 3), "bf16": (9, 4), "norm": (33,), "big": (3, 1_000_003)}
BY_ROW, BY_COLUMN, WHOLE = 0, 1, None
"""Along which dimension matrices are split over two ranks; each has all of vectors, and with none all of matrices."""


def values(seed: float = 0, scale: int = 1) -> dict[str, torch.Tensor]:
    whole = {name: scale * torch.arange(prod(shape)).view(shape) + seed for name, shape in SHAPES.items()}
    return {name: tensor.to(torch.bfloat16 if name == "bf16" else torch.float32) for name, tensor in whole.items()}


def share(tensor: torch.Tensor, dim: int) -> TensorParts:
    """This one of two ranks' share of a tensor that is split in two, unevenly where it must be."""
    start, stop = (r * tensor.shape[dim] // 2 for r in (dist.get_rank(), dist.get_rank() + 1))
    offsets = tuple(start if d == dim else 0 for d in range(tensor.dim()))
    return TensorParts(tensor.shape, ((offsets, tensor.narrow(dim, start, stop - start)),), tensor.dtype)


def spread(tensors: dict[str, torch.Tensor], dim: int | None) -> Tensors:
    return {name: t if dim is None or t.dim() == 1 else share(t, dim) for name, t in tensors.items()}


def zeros() -> dict[str, torch.Tensor]:
    return values(scale=0)


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    for name in wanted:
        for (at, part), (here, other) in zip(as_parts(found[name]).parts, as_parts(wanted[name]).parts, strict=True):
            assert at == here and torch.equal(part, other), (name, at)


def reshard(rank: int, root: Path) -> None:
    for iteration, saved_by in enumerate([BY_ROW, BY_COLUMN, WHOLE]):
        saved = spread(values(), saved_by)
        saved[f"stage{rank}"] = torch.full((4,), float(rank))  # each rank has a name of its own
        save_checkpoint(root, iteration, saved, {"layout": iteration})
        for loaded_by in (BY_ROW, BY_COLUMN, WHOLE):
            targets = spread(zeros(), loaded_by) | {f"stage{rank}": torch.zeros(4)}
            assert load_checkpoint(root, targets).iteration == iteration
            assert_equal(targets, spread(values(), loaded_by))
            assert targets[f"stage{rank}"].tolist() == [rank] * 4
    # Tensors without elements, in empty parts and in none.
    empty = {"e": share(torch.empty(0, 2), 0), "f": TensorParts(torch.Size([2, 0]), (), torch.float32)}
    save_checkpoint(root, 9, {"w": share(torch.arange(3.0), 0)} | empty, {})
    assert verify_checkpoint(root / "iter_0000009") == []


def test_any_layout_loads_into_any_other(tmp_path: Path) -> None:
    spawn(reshard, 2, tmp_path)
    for iteration in range(3):  # and into one process without a group
        path = tmp_path / f"iter_{iteration:07d}"
        targets = zeros() | {"stage0": torch.ones(4), "stage1": torch.zeros(4)}
        assert load_checkpoint(tmp_path, targets, iteration=iteration).meta == {"layout": iteration}
        assert_equal(targets, values() | {"stage0": torch.zeros(4), "stage1": torch.ones(4)})
        assert_equal(read_tensors(path), values())
        sizes = [(path / f"rank0000{rank}.bin").stat().st_size for rank in (0, 1)]
        assert sum(sizes) == read_manifest(path).nbytes and min(sizes) > 0  # replicas are stored once, on both ranks
    whole = read_tensors(tmp_path / "iter_0000009")
    assert whole["w"].tolist() == [0, 1, 2] and (whole["e"].shape, whole["f"].shape) == ((0, 2), (2, 0))


CUT_SHAPES = {"embed": (11, 4), "column": (4, 13), "experts": (3, 5, 7), "norm": (9,), "scale": ()}
SPLIT_DIMS = {"embed": 0, "column": 1, "experts": 2}  # over the tensor axis; the others are whole on each of its ranks


def cut_values() -> dict[str, torch.Tensor]:
    return {name: torch.arange(prod(shape)).view(shape) + 0.5 for name, shape in CUT_SHAPES.items()}


def cut(tensor_size: int, data_size: int, rank: int, seed: int) -> tuple[dict[str, TensorParts], torch.Tensor]:
    """What one rank holds when each tensor rank's share of all tensors, as one flat buffer, is cut anywhere.

    Returns: the parts, filled with the values, and the flat buffer beneath them.
    """
    tensor_rank, data_rank = rank % tensor_size, rank // tensor_size
    boxes = {}
    for name, shape in CUT_SHAPES.items():
        sizes, offsets = list(shape), [0] * len(shape)
        if (dim := SPLIT_DIMS.get(name)) is not None:
            offsets[dim] = tensor_rank * shape[dim] // tensor_size
            sizes[dim] = (tensor_rank + 1) * shape[dim] // tensor_size - offsets[dim]
        boxes[name] = sizes, offsets
    ends = list(accumulate((prod(sizes) for sizes, _ in boxes.values()), initial=0))
    rng = random.Random(f"{seed} {tensor_rank}")
    low, high = list(pairwise(sorted([0, ends[-1], *(rng.randint(0, ends[-1]) for _ in range(data_size - 1))])))[
        data_rank
    ]
    flat, parts = torch.zeros(high - low), {}
    for (name, (sizes, offsets)), (first, last) in zip(boxes.items(), pairwise(ends), strict=True):
        start, stop = (min(max(at, first), last) for at in (low, high))
        if start < stop or data_rank % 2:  # a rank that holds nothing of a tensor may name it or not
            view = flat[start - low : stop - low] if start < stop else flat[:0]
            parts[name] = parts_of_flat(CUT_SHAPES[name], sizes, offsets, start - first, stop - first, view)
            parts[name].fill(cut_values()[name])
    return parts, flat


def save_and_load_cuts(rank: int, root: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    for iteration, saved_on in enumerate([(2, 2), (4, 1), (1, 4)]):
        for seed in range(3):
            number = 10 * iteration + seed
            save_checkpoint(root, number, cut(*saved_on, rank, seed)[0], {})
            for layout in [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2)]:
                if rank < prod(layout):
                    targets, flat = cut(*layout, rank, seed + 100)
                    wanted = flat.clone()
                    flat.zero_()
                    assert load_checkpoint(root, targets, process_group=groups[prod(layout)]).iteration == number
                    assert torch.equal(flat, wanted), (saved_on, layout, seed)


def test_any_cut_of_any_shares_loads_into_any_other(tmp_path: Path) -> None:
    spawn(save_and_load_cuts, 4, tmp_path)
    for number in (0, 1, 2, 10, 11, 12, 20, 21, 22):  # and into one process without a group
        path = tmp_path / f"iter_{number:07d}"
        assert verify_checkpoint(path) == []
        assert all(torch.equal(tensor, cut_values()[name]) for name, tensor in read_tensors(path).items())
        num_bytes = 4 * sum(map(prod, CUT_SHAPES.values()))
        assert sum(file.stat().st_size for file in path.glob("*.bin")) == num_bytes  # replicas are stored once


def save_wrong_layouts(rank: int, root: Path) -> None:
    def rows(start: int, stop: int) -> TensorParts:
        return parts_of_flat([4, 3], [4, 3], [0, 0], 3 * start, 3 * stop, torch.zeros(3 * (stop - start)))

    def must_fail(saved: Tensors, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(root, 1, {"good": share(torch.zeros(4), 0)} | saved, {})
        dist.barrier()
        assert list(root.glob("iter_*")) == []

    must_fail({"w": rows(2 * rank, 2 + rank)}, r"of tensor 'w' \[4, 3\] the ranks hold 9 of 12 elements; nothing")
    must_fail(
        {"w": rows(rank, 2 + 2 * rank)}, r"'w' \[4, 3\] the parts \[2, 3\] at \[0, 0\] and \[3, 3\] at \[1, 0\] overlap"
    )
    # As many elements as there should be, but some twice and some never; and the same place with other sizes.
    must_fail({"w": rows(rank, 2 + rank)}, "'w'.* overlap")
    must_fail({"w": rows(0, 2 + 2 * rank)}, "'w'.* overlap")
    must_fail({"w": rows(0, 0)}, "'w'.* hold 0 of 12")
    must_fail({"w": rows(0, 0), "v": torch.zeros(2), "x": rows(1, 2)}, r"'w'.*\(and 1 more tensors")
    save_checkpoint(root, 1, {"w": rows(2 * rank, 2 + 2 * rank)}, {})


def fail_in_turn(rank: int, root: Path) -> None:
    save_checkpoint(root, 1, spread(values(), BY_ROW), {})
    dist.barrier()

    def must_fail(saved: Tensors, message: str, iteration: int = 2) -> None:
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(root, iteration, saved, {})
        assert time.monotonic() - start < 60  # the group would wait five minutes
        dist.barrier()
        assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000001"]

    must_fail({"a": torch.ones(1, dtype=torch.complex64 if rank else torch.float32)}, "complex64")
    must_fail({"a": torch.ones(2 + rank)}, r"ranks disagree about tensor 'a'.*\[3\] on rank 1.*\[2\] on rank 0")
    real = os.pwrite
    if rank == 1:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    must_fail(spread(values(), BY_ROW), "rank00001.bin: No space left on device")
    os.pwrite = real

    targets = {"a": torch.zeros(1)} if rank else zeros()
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
    targets = spread(zeros(), BY_ROW)
    loaded = load_checkpoint(root, targets, report=said.append)
    assert loaded.iteration == 1 and "rank00001.bin: tensor" in loaded.skipped[0]
    assert_equal(targets, spread(values(1), BY_ROW))
    assert len(said) == (1 if rank == 0 else 0)
    # The damaged one does not count as whole, so keep=1 spares what else there is until a newer one is proved.
    save_checkpoint(root, 2, spread(values(2), BY_ROW), {}, keep=1, report=said.append)
    assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000002", "iter_0000002.damaged-1"]


def refuse_and_fall_back(rank: int, root: Path) -> None:
    save_wrong_layouts(rank, root / "wrong")
    fail_in_turn(rank, root / "fail")
    fall_back_together(rank, root / "fall_back")


def test_holes_overlaps_and_one_ranks_errors_or_damage_are_everyones(tmp_path: Path) -> None:
    """A layout with holes or overlaps is never a checkpoint."""
    spawn(refuse_and_fall_back, 2, tmp_path)
    hole = parts_of_flat([4, 3], [4, 3], [0, 0], 0, 11, torch.zeros(11))
    with pytest.raises(CheckpointError, match="'w'.* hold 11 of 12"):  # one process without a group, too
        save_checkpoint(tmp_path / "wrong", 2, {"w": hole}, {})
    assert [path.name for path in tmp_path.glob("wrong/iter_*")] == ["iter_0000001"]
