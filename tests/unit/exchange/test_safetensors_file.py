"""safetensors files: written as the format's own library writes them, and refused where a header lies."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint.assembly import Assembly, Reading, Room
from gptpar.checkpoint.data_file import AlignedBuffers
from gptpar.checkpoint.patches import ParameterView
from gptpar.errors import CheckpointError
from gptpar.exchange.files.safetensors_file import SafetensorsWriter, header_of, open_safetensors


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    dtypes = {"b": torch.float32, "a": torch.bfloat16, "c": torch.float16, "d": torch.float64, "ä": torch.float32}
    return {name: torch.randn(3, 5, generator=generator).to(dtype) for name, dtype in dtypes.items()}


def test_a_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    library.save_file(tensors(), theirs, metadata={"format": "pt"})
    writer = SafetensorsWriter(ours, header_of({name: (t.dtype, tuple(t.shape)) for name, t in tensors().items()}))
    assembly, box = Assembly(Room.within(0)), ((0, 0), (5, 3))

    def reading(name: str, tensor: torch.Tensor) -> Reading:
        view = ParameterView((5, 3), lambda whole: whole.t())
        patches = view.of_parameter(box, tensor.t().contiguous())
        blocks = writer.new_tensor(name, view).touching(view.elements(view.boxes(box)))
        return Reading(blocks, lambda some: assembly.fill(some, name, patches))

    assembly.run([reading(name, tensor)] for name, tensor in tensors().items())
    writer.sync()
    writer.close()
    assert ours.read_bytes() == theirs.read_bytes()
    file, buffers = open_safetensors(theirs), AlignedBuffers(1)
    for name, tensor in tensors().items():
        for past_cache in (False, True):
            with file.part(name, 4, 14, buffers, past_cache=past_cache) as values:
                assert torch.equal(values, tensor.view(-1)[4:14])


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changed


BAD = {
    "no object": ([1], 24, "no object"),
    "a size below zero": ({"w": entry(shape=[-2, -3])}, 24, "not whole numbers"),
    "a size beyond all numbers": ({"w": entry(shape=[2**70, 0], data_offsets=[0, 0])}, 0, "not whole numbers"),
    "a truth": ({"w": entry(shape=[True, 6])}, 24, "not whole numbers"),
    "bytes past the end": ({"w": entry(data_offsets=[8, 32])}, 24, "leave a gap, overlap or reach past the end"),
    "bytes of nobody": ({"w": entry()}, 30, "leave a gap"),
    "an overlap": ({"v": entry(), "w": entry(data_offsets=[12, 36])}, 36, "overlap"),
    "an unknown format": ({"w": entry(dtype="X9")}, 24, "unknown format, 'X9'"),
    "many dims": ({"w": entry(shape=[1] * 70 + [6])}, 24, "not whole numbers"),
}


def with_header(text: bytes, num_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    fields, num_bytes, told = BAD[name]
    (tmp_path / "w").write_bytes(with_header(json.dumps(fields).encode(), num_bytes))
    with pytest.raises(CheckpointError, match=told):
        open_safetensors(tmp_path / "w")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"abc", "is no safetensors file: 3 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "whose header claims 9,223,372,036,854,775,808"),
        (with_header(b"[" * 200_000), "damaged or a hostile"),
        (with_header(b"\xff\xff\xff\xff"), "damaged or a hostile"),
        (with_header(b'{"a":1,"a":{}}'), "a name stands twice"),
        (with_header(b'{"a":' + b"9" * 5002 + b"}"), "damaged or a hostile"),
    ],
)
def test_a_file_that_is_none_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        open_safetensors(tmp_path / "w")
