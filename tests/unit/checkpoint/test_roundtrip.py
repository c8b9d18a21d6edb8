from functools import partial
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, latest, load_checkpoint, load_meta, read_manifest, read_tensors
from gptpar.checkpoint import save_checkpoint as save
from gptpar.checkpoint.manifest import PIECE_BYTES
from gptpar.errors import CheckpointError
from gptpar.system.regions import copy_bytes
from gptpar.system.snapshot import Snapshot
from gptpar.topology.tensor_parts import whole

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def all_sorts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"float.{dtype}": torch.randn(5, 7).to(dtype) for dtype in FLOATS}
    tensors |= {f"int.{dtype}": torch.arange(11).to(dtype) for dtype in INTEGERS}
    return tensors | {
        "bool": torch.rand(3, 3, 3) > 0.5,
        "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "large": torch.randn(3, 1_000_003),
        "transposed": torch.randn(700, 6000).t(),
        "strided": torch.randn(40, 40)[::3, 1::2],
        "strided column": torch.randn(9, 5)[:, 3],
        "one of a strided": torch.arange(8.0)[4::4][:1],
        'odd/../name "\n\u00e9\u4e2d\x00': torch.ones(2),
        "": torch.zeros(1),
    }


def bits(tensor: torch.Tensor) -> list[bytes]:
    """The tensor's row-major bytes in pieces."""
    snapshot, found = Snapshot([tensor]), []
    for piece in snapshot.pieces(tensor):
        found.append(torch.empty(piece.num_bytes, dtype=torch.uint8))
        snapshot.read(piece, partial(copy_bytes, found[-1]))
    return [bytes(piece.numpy().data) for piece in found]


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert b"".join(bits(a[name])) == b"".join(bits(b[name])), name


def test_every_dtype_and_shape_comes_back_bit_equal(tmp_path: Path) -> None:
    saved = all_sorts()
    path = save(tmp_path, 10, saved, {"samples": 12, "lr": 1e-4, "betas": (0.9, 0.95)})
    assert path == tmp_path / "iter_0000010" == latest(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank00000.bin"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"

    targets = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    loaded = load_checkpoint(tmp_path, targets)
    assert (loaded.iteration, loaded.path, loaded.skipped) == (10, path, [])
    assert loaded.meta == load_meta(tmp_path) == {"samples": 12, "lr": 1e-4, "betas": [0.9, 0.95]}
    assert_same_bits(targets, saved)
    assert_same_bits(read_tensors(path), saved)
    assert read_tensors(path, ["scalar"]).keys() == {"scalar"}
    part = read_tensors(path, ["large", "scalar"], boxes={"large": ((1, 999_990), (2, 7))})
    assert_same_bits(part, {"large": saved["large"][1:, 999_990:999_997].clone(), "scalar": saved["scalar"]})
    manifest = read_manifest(path)
    assert manifest.nbytes == sum(t.nbytes for t in saved.values()) == (path / "rank00000.bin").stat().st_size
    assert [length for length, _ in manifest.tensors["large"].chunks[0].pieces] == [PIECE_BYTES, 12000036 - PIECE_BYTES]


def test_parameters_and_strided_targets_are_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4.0)}, {})
    parameter, flat = torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(8)
    load_checkpoint(tmp_path, {"w": parameter, "v": flat[::2]})
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]] and parameter.requires_grad
    assert flat.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 5_000_000), (3, 2, 1_500_000)])
def test_non_contiguous_tensors_stream_in_small_pieces(shape: tuple[int, ...]) -> None:
    reversed_dims = tuple(reversed(range(len(shape))))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape[::-1]).permute(reversed_dims)
    pieces = bits(tensor)
    assert max(map(len, pieces)) <= PIECE_BYTES and len(pieces) < 4 * tensor.nbytes / PIECE_BYTES + 4
    assert b"".join(pieces) == tensor.contiguous().numpy().tobytes()


def test_all_mismatches_are_told_at_once_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path, 5, {"a": torch.ones(4), "b": torch.ones(2, 3), "c": torch.ones(2), "extra": torch.ones(1)}, {})
    targets = {"a": torch.zeros(4), "b": torch.zeros(3, 2), "c": torch.zeros(2).bfloat16(), "more": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path, targets)
    for told in (
        "(4 differences)",
        "tensor 'b' is [2, 3] in the checkpoint and [3, 2] here",
        "tensor 'c' is float32 in the checkpoint and bfloat16 here; it is not cast",
        "tensor 'more' is not in the checkpoint",
        "tensor 'extra' is in the checkpoint and nothing asks for it",
    ):
        assert told in str(error.value)
    with pytest.raises(CheckpointError, match="2 differences"):  # never cast, never reshaped, strict or not
        load_checkpoint(tmp_path, targets, strict=False)
    assert targets["a"].sum() == 0
    said: list[str] = []
    load_checkpoint(tmp_path, {"a": targets["a"], "more": targets["more"]}, strict=False, report=said.append)
    assert targets["a"].sum() == 4 and targets["more"].sum() == 0
    assert len(said) == 4 and all("left alone" in sentence for sentence in said)


def test_wrong_input_is_refused_with_all_reasons(tmp_path: Path) -> None:
    meta = torch.zeros(1, device="meta")
    tensors = {"a": torch.zeros(1, dtype=torch.complex64), "b": [1.0], "c": meta, "d": whole(meta)}
    tensors["e"] = torch.zeros(1).as_subclass(type("Wrapper", (torch.Tensor,), {}))
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, -1, tensors, {"x": {1, 2}}, keep=0)  # type: ignore[arg-type]
    told = ("iteration is -1", "keep is 0", "JSON", "complex64", "'b'", "'c'", "'d'", "'e'")
    assert all(part in str(error.value) for part in told)
    assert find_checkpoints(tmp_path) == []
