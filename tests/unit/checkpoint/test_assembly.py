"""Blocks of new tensors: how many are in memory at once, and what happens where they do not fit."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import assembly as assembly_module
from gptpar.checkpoint import data_file
from gptpar.checkpoint.assembly import Assembly, FileBlock, NewTensor, Reading, Room
from gptpar.checkpoint.data_file import DataFile
from gptpar.checkpoint.patches import ParameterView
from gptpar.errors import CheckpointError

ROWS, COLUMNS, PIECE = 96, 80, 4096  # 1,024 elements a piece, 30 KiB in all


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "PIECE_BYTES", PIECE)


def transposed(path: Path) -> tuple[DataFile, NewTensor, ParameterView]:
    file, view = DataFile(path), ParameterView((ROWS, COLUMNS), lambda whole: whole.t())
    tensor = NewTensor(
        file, 0, torch.float32, ROWS * COLUMNS, lambda start, values: {"w": view.of_elements(start, values)}
    )
    return file, tensor, view


def readings_of(
    values: torch.Tensor, tensor: NewTensor, view: ParameterView, assembly: Assembly, seen: list[int]
) -> list[Reading]:
    """A reading for each 8 rows."""

    def reading(row: int) -> Reading:
        box = (row, 0), (8, COLUMNS)

        def give(blocks: list[FileBlock]) -> None:
            seen.append(row)
            assembly.fill(blocks, "w", view.of_parameter(box, values[row : row + 8].clone()))

        return Reading(tensor.touching(view.elements(view.boxes(box))), give)  # type: ignore[arg-type]

    return [reading(row) for row in range(0, ROWS, 8)]


@pytest.mark.parametrize(("readers", "blocks", "times"), [(1, 8, 1), (5, 4, 2), (1, 3, 3)])
def test_a_transposed_tensor_is_read_as_often_as_its_blocks_need(
    readers: int, blocks: int, times: int, tmp_path: Path
) -> None:
    values = torch.randn(ROWS, COLUMNS)
    file, tensor, view = transposed(tmp_path / "new")
    assert len(tensor.blocks) == 8
    assembly, seen = Assembly(Room(readers, blocks)), list[int]()
    assembly.run([readings_of(values, tensor, view, assembly, seen)])
    file.sync()
    file.close()
    assert (tmp_path / "new").read_bytes() == values.t().contiguous().numpy().tobytes()
    assert Counter(seen) == dict.fromkeys(range(0, ROWS, 8), times)
    assert assembly.most_begun == min(blocks, 8)


def test_a_reading_without_elements_of_a_block_does_not_complete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading names more blocks than it has elements of; meanwhile another one completes such a block."""
    values, assembly = torch.randn(ROWS, COLUMNS), Assembly(Room(1, 8))
    file, tensor, view = transposed(tmp_path / "new")
    copy = assembly_module.copy_elements

    def give_all(blocks: Sequence[FileBlock]) -> None:
        assembly.fill(blocks, "w", view.of_parameter(((0, 0), (ROWS, COLUMNS)), values))

    def give_none(blocks: Sequence[FileBlock]) -> None:
        monkeypatch.setattr(assembly_module, "copy_elements", beside_another)
        assembly.fill(blocks, "w", [])

    def beside_another(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        monkeypatch.setattr(assembly_module, "copy_elements", copy)
        give_all(tensor.blocks[:1])
        copy(pairs)

    assembly.run([[Reading(tensor.blocks[:1], give_none), Reading(tensor.blocks, give_all)]])
    file.sync()
    file.close()
    assert (tmp_path / "new").read_bytes() == values.t().contiguous().numpy().tobytes()


def test_a_write_that_fails_ends_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensor, view = transposed(tmp_path / "new")
    assembly, seen = Assembly(Room(2, 8)), list[int]()
    readings = readings_of(torch.randn(ROWS, COLUMNS), tensor, view, assembly, seen)

    def full(place: int, data: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(file, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        assembly.run([readings])
    file.close()
    assert sorted(seen) == list(range(0, ROWS, 8))
