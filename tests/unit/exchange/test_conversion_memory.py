"""Conversions take no more memory than the largest tensor, whatever is transposed, cut or joined on the way.

The pieces are 16 KiB instead of 8 MiB here, and the least memory is 4 of them, so that small models show it.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import assembly, data_file, read_manifest, read_tensors, streamed
from gptpar.checkpoint.patches import ParameterView
from gptpar.checkpoint.pieces import ChunkFiles
from gptpar.checkpoint.streamed import StreamedCheckpoint, StreamedPart, write_checkpoint
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.exchange.convert import import_model as import_hf
from gptpar.exchange.files.safetensors_file import NAME_OF, open_safetensors
from gptpar.exchange.foreign_model import converted_meta
from gptpar.exchange.hf_export import ExportOptions, prepare_export
from gptpar.exchange.hf_folder import shapes_of
from gptpar.model.families import tensors_of
from gptpar.topology.tensor_parts import box_view
from tests.helpers import tiny_config

PIECE = 16 << 10
WIDE = "--hidden-size 128 --num-attention-heads 4"
MODELS = {
    "gpt2": WIDE,
    "llama": WIDE + " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights",
    "qwen3_moe": WIDE + " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--num-experts 16 --moe-ffn-hidden-size 48 --moe-layer-freq 2 --qk-layernorm --num-query-groups 2",
}


@dataclass
class Counted:
    """The bytes of the buffers that conversions made, and the pieces of checkpoints that they read."""

    num_bytes: int = 0
    read: int = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, of_pieces, read = Counted(), data_file.aligned_memory, ChunkFiles.read

    def make(*, pinned: bool = False) -> torch.Tensor:
        memory = of_pieces(pinned=pinned)
        found.num_bytes += memory.nbytes  # alignment takes addresses, but no pages
        return memory

    def read_counted(*args: object) -> object:
        found.read += 1
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data_file, "PIECE_BYTES", PIECE)
    for module in (data_file, assembly):
        monkeypatch.setattr(module, "BUFFER_BYTES", PIECE + 3 * data_file.BLOCK_BYTES)
        monkeypatch.setattr(module, "aligned_memory", make)
    monkeypatch.setattr(assembly, "MIN_BUFFERS", 4)
    monkeypatch.setattr(streamed, "_ELEMENTS", PIECE // 8)
    monkeypatch.setattr(ChunkFiles, "read", read_counted)
    return found


def random_checkpoint(root: Path, model: ModelConfig) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(model).items()}

    def fill(file: StreamedCheckpoint) -> None:
        for name, value in weights.items():
            view = ParameterView(value.shape, lambda whole: whole)
            parts = [StreamedPart(view, [value])]
            file.write(f"weights/{name}", tuple(value.shape), value.dtype, parts, lambda *_: None)

    meta = converted_meta(model, TokenizerConfig(), "nothing", vocab_size=60)
    return write_checkpoint(root, 0, fill, meta), weights


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_an_export_and_the_way_back(family: str, dtype: torch.dtype, counted: Counted, tmp_path: Path) -> None:
    model = tiny_config(MODELS[family]).model
    path, weights = random_checkpoint(tmp_path / "run", model)
    largest = max(value.nbytes for value in weights.values())
    assert largest >= 9 * (PIECE + 3 * data_file.BLOCK_BYTES)
    options = ExportOptions(dtype=dtype, max_shard_bytes=600_000)
    counted.num_bytes = counted.read = 0
    prepare_export(path, tmp_path / "hf", options).write(tmp_path / "hf")
    assert 0 < counted.num_bytes <= largest
    pieces = [len(chunk.pieces) for entry in read_manifest(path).tensors.values() for chunk in entry.chunks]
    assert counted.read >= sum(pieces) > 100
    files = [open_safetensors(file) for file in sorted((tmp_path / "hf").glob("*.safetensors"))]
    assert len(files) > 1
    wanted = {one.name: one.view(weights[one.ours]).reshape(one.shape) for one in tensors_of(family, model, 60)}
    assert {name for file in files for name in file.tensors} == wanted.keys()
    for file in files:
        raw = file.path.read_bytes()[file.data_start :]
        for name, stored in file.tensors.items():
            assert (stored.dtype, stored.shape) == (NAME_OF[dtype], tuple(wanted[name].shape))
            found = torch.frombuffer(bytearray(raw[stored.start : stored.stop]), dtype=dtype)
            assert torch.equal(found, wanted[name].to(dtype).reshape(-1)), name
    counted.num_bytes = 0
    back = import_hf(tmp_path / "hf", tmp_path / "back")
    assert 0 < counted.num_bytes <= largest * (2 if dtype == torch.float64 else 1)  # of the new checkpoint
    for name, value in read_tensors(back).items():
        whole = weights[name.removeprefix("weights/")]
        rows = box_view(whole, ((0,) * whole.dim(), tuple(value.shape)), (0,) * whole.dim())  # without padding
        assert torch.equal(value, rows.to(dtype).to(value.dtype)), name
