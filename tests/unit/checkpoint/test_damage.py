import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import (
    DamagedCheckpoint,
    find_checkpoints,
    load_checkpoint,
    load_meta,
    read_manifest,
    read_tensors,
    save_checkpoint,
    verify_checkpoint,
)
from gptpar.checkpoint.verify import sound_files
from gptpar.cli.inspect import main as inspect
from gptpar.cli.runs import main as runs
from gptpar.errors import CheckpointError

SIZES = {"model.a": 1000, "model.b": 3_000_000, "optim.c": 7}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(value)) for name, size in SIZES.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 1, 2 and 3; every tensor of iteration i is full of i."""
    root = tmp_path_factory.mktemp("written")
    for iteration in (1, 2, 3):
        save_checkpoint(root, iteration, tensors(iteration), {"iteration": iteration})
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_no_sound_one(root: Path) -> None:
    """As a machine in a ring asks that is to send its files to one that has lost them."""
    newest, name = root / "iter_0000003", "rank00000.bin"
    manifest = read_manifest(newest)
    assert sound_files(newest, manifest, [name, "rank00001.bin"]) == ({name}, [])
    flip(newest / name, 4000)
    sound, problems = sound_files(newest, manifest, [name, "rank00001.bin"])
    assert sound == set() and len(problems) == 1 and problems[0].startswith(f"{newest / name}: tensor ")


@pytest.mark.parametrize(
    ("offset", "tensor", "piece"),
    [(0, "model.a", "0..4000"), (8392608, "model.b", "8392608..12004000"), (12004027, "optim.c", "12004000..12004028")],
)
def test_one_flipped_bit_is_named_and_the_previous_checkpoint_used(
    root: Path, offset: int, tensor: str, piece: str
) -> None:
    newest = root / "iter_0000003"
    flip(newest / "rank00000.bin", offset)
    targets, said = tensors(0), []
    loaded = load_checkpoint(root, targets, report=said.append)
    assert (loaded.iteration, loaded.meta) == (2, {"iteration": 2})
    assert all(torch.equal(targets[name], wanted) for name, wanted in tensors(2).items())
    told = (loaded.skipped, said, verify_checkpoint(newest))
    assert all(len(sentences) == 1 for sentences in told)
    assert all(f"rank00000.bin: tensor '{tensor}', bytes {piece}: damaged, CRC-32" in one for (one,) in told)
    with pytest.raises(DamagedCheckpoint, match=tensor):
        read_tensors(newest)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda c: os.truncate(c / "rank00000.bin", 12003998),
        "ends at byte 12,003,998 of 12,004,028: tensor 'model.b' (bytes 4000..12004000)",
    ),
    (
        lambda c: os.truncate(c / "rank00000.bin", 12004029),
        "has 12,004,029 bytes and should have 12,004,028",
    ),
    (lambda c: (c / "rank00000.bin").unlink(), "rank00000.bin cannot be opened: No such file"),
    (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda c: (c / "manifest.json").write_text('{"manifest": {'), "manifest.json"),
    (lambda c: (c / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read (RecursionError"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_other_damage_is_named_and_the_previous_checkpoint_used(
    root: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(root / "iter_0000003")
    loaded = load_checkpoint(root, targets := tensors(0), report=lambda _: None)
    assert loaded.iteration == 2 and targets["optim.c"].tolist() == [2.0] * 7
    assert sentence in loaded.skipped[0]
    assert sentence in verify_checkpoint(root / "iter_0000003")[0]


def test_every_flipped_manifest_byte_is_caught_or_harmless(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, {"w": torch.arange(3)}, {"note": "caf\u00e9", "x": 0.1})
    good, text = read_manifest(path), (path / "manifest.json").read_bytes()
    caught = 0
    for offset in range(len(text)):
        flip(path / "manifest.json", offset)
        try:
            assert read_manifest(path) == good
        except DamagedCheckpoint:
            caught += 1
        (path / "manifest.json").write_bytes(text)
    assert caught > 0.9 * len(text)


def test_an_iteration_asked_for_has_no_stand_in(root: Path) -> None:
    flip(root / "iter_0000002" / "rank00000.bin", 5)
    with pytest.raises(CheckpointError, match="bytes 0..4000"):
        load_checkpoint(root, tensors(0), iteration=2, report=lambda _: None)
    assert load_checkpoint(root, tensors(0), iteration=1).iteration == 1
    (root / "iter_0000001").rename(root / "iter_0000009")
    with pytest.raises(CheckpointError, match="says of itself that it is iteration 1"):
        load_checkpoint(root, tensors(0), iteration=9, report=lambda _: None)


def forge(path: Path, change: Callable[[dict], None]) -> None:
    """Alter a manifest and give it a valid SHA-256, as an attacker would."""
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    document = {"sha256": hashlib.sha256(canonical.encode()).hexdigest(), "manifest": body}
    (path / "manifest.json").write_text(json.dumps(document))


def chunk(offset: int, size: int, start: int) -> dict[str, object]:
    return {"offsets": [offset], "sizes": [size], "file": "rank00000.bin", "start": start, "pieces": [[8 * size, 0]]}


FORGERIES: list[dict[str, object]] = [
    {"file": "../../../etc/passwd"},
    {"start": -8},
    {"start": 1 << 70},
    {"pieces": [[3, 0], [21, 0]]},
    {"shape": [1 << 60]},
    {"dtype": "torch.os.system"},
    {"chunks": []},
    {"shape": [0] * 65, "chunks": []},
    {"chunks": [chunk(1, 1, 0), chunk(1, 1, 8), chunk(1, 1, 16)]},
]
"""Fields of a tensor, or of its one chunk."""


@pytest.mark.parametrize("fields", [*FORGERIES, {"version": 2}, {"tensors": None}], ids=str)
def test_forged_manifests_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    path = save_checkpoint(tmp_path, 3, {"w": torch.arange(3)}, {})

    def change(body: dict[str, Any]) -> None:
        tensor = body["tensors"]["w"]
        if "tensors" in fields:  # two that lie at the same place
            body["tensors"]["v"] = tensor
        else:
            next(one for one in (tensor["chunks"][0], tensor, body) if fields.keys() <= one.keys()).update(fields)

    forge(path, change)
    for read in (read_manifest, read_tensors):
        with pytest.raises(DamagedCheckpoint, match="manifest.json"):
            read(path)


@pytest.mark.slow
def test_a_file_of_holes_is_not_taken_into_memory(tmp_path: Path) -> None:
    """A manifest of 2 MB and a sparse file may name more than any machine has; what is not there is seen sooner."""
    path = save_checkpoint(tmp_path, 3, {"w": torch.zeros(8, dtype=torch.uint8)}, {})
    size = 1 << 40
    one = {**chunk(0, size, 0), "pieces": [[8 << 20, 0]] * (size // (8 << 20))}
    forge(path, lambda body: body["tensors"]["w"].update(shape=[size], chunks=[one]))
    with pytest.raises(DamagedCheckpoint, match="ends at byte 8 of 1,099,511,627,776"):
        read_tensors(path)
    os.truncate(path / "rank00000.bin", size)
    with pytest.raises(DamagedCheckpoint, match="names 1,099,511,627,776 bytes and takes .* its files are holes"):
        read_tensors(path)


def iterations(folder: Path) -> list[int]:
    return [iteration for iteration, _ in find_checkpoints(folder)]


def small(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5,), float(value))}


def test_retention_keeps_the_newest_and_the_last_whole_one(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, small(iteration), {}, keep=2)
    assert iterations(tmp_path) == [3, 2]
    save_checkpoint(tmp_path, 4, small(4), {})
    save_checkpoint(tmp_path, 5, small(5), {})
    flip(tmp_path / "iter_0000005" / "rank00000.bin", 0)
    said: list[str] = []
    save_checkpoint(tmp_path, 1, small(1), {}, keep=1, report=said.append)
    assert iterations(tmp_path) == [5, 4, 3, 2, 1] and "none of the newest 1 could be proved whole" in said[-1]
    save_checkpoint(tmp_path, 6, small(6), {}, keep=2)
    assert iterations(tmp_path) == [6, 5]


def test_retention_neither_counts_nor_deletes_later_iterations(tmp_path: Path) -> None:
    """As where a run goes back in the folder of another: what was just saved is never what is deleted."""
    for iteration, keep in ((10, None), (30, None), (40, None), (14, 2), (21, 2), (28, 2)):
        save_checkpoint(tmp_path, iteration, small(iteration), {}, keep=keep)
    assert iterations(tmp_path) == [40, 30, 28, 21]


def test_inspect_lists_shows_and_verifies(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: Path | str, code: int = 0) -> str:
        assert inspect([str(word) for word in words]) == code
        return capsys.readouterr().out

    listing = printed(root)
    assert [line.split()[0] for line in listing.splitlines()] == ["iteration", "3", "2", "1"]
    assert "3,001,007 (model 3,001,000, optim 7)" in listing
    newest, older = root / "iter_0000003", root / "iter_0000002"
    one = printed(newest, "--verify")
    assert "meta: iteration=3" in one and "total: 3 tensors, 3,001,007 elements, 11.45 MiB" in one
    assert "every byte of" in one
    for offset in (0, 12004001):
        flip(older / "rank00000.bin", offset)
    assert "DAMAGED" not in printed(root) and printed(root, "--verify", code=1).count("DAMAGED") == 2
    summary = json.loads(printed(older, "--verify", "--json", code=1))
    assert len(summary["problems"]) == 2 and summary["table"][0]["shape"] == [1000]
    (root / "empty").mkdir()
    for name, told in (("empty", "no checkpoint"), ("absent", "absent does not exist: name a folder of checkpoints.")):
        with pytest.raises(CheckpointError, match=told):
            inspect([str(root / name)])
    with pytest.raises(CheckpointError, match=f"{newest} is itself a checkpoint: gptpar inspect {newest} shows it"):
        runs([str(newest)])


def test_nothing_whole_left_lists_every_damage_and_proved_first_no_byte_is_used(root: Path) -> None:
    for iteration in (1, 2, 3):
        flip(root / f"iter_000000{iteration}" / "rank00000.bin", 12004027)  # in the last tensor
    targets = tensors(0)
    for prove_first in (True, False):
        with pytest.raises(DamagedCheckpoint, match="(?s)no whole checkpoint in.*so nothing can be resumed") as error:
            load_checkpoint(root, targets, prove_first=prove_first, report=lambda _: None)
        assert str(error.value).count("damaged, CRC-32") == 3
        assert all(torch.equal(targets[name], zeros) for name, zeros in tensors(0).items()) == prove_first
    assert load_meta(root) == {"iteration": 3}


def test_tensors_that_may_stay_are_no_difference(root: Path) -> None:
    targets = {"model.a": torch.zeros(1000)}
    load_checkpoint(root, targets, may_stay=lambda name: name != "model.a")
    assert (targets["model.a"] == 3).all()
    with pytest.raises(CheckpointError, match=r"\(1 differences\):\n.*'model.b' is in the checkpoint.*\nAsk for less."):
        load_checkpoint(root, targets, may_stay=lambda name: name == "optim.c", remedy="Ask for less.")


def test_a_replaced_checkpoint_goes_when_the_new_one_is_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(root, 4, small(4), {}, replaces=[root / "iter_0000002"])
    assert iterations(root) == [4, 3, 1]
    save_checkpoint(root, 4, small(4), {}, replaces=[root / "iter_0000001"])  # is there, and proved
    assert iterations(root) == [4, 3]
    monkeypatch.setattr("gptpar.checkpoint.save.damaged_on_any_rank", lambda *_: ["a bad disk"])
    said: list[str] = []
    save_checkpoint(root, 5, small(5), {}, replaces=[root / "iter_0000003"], report=said.append)
    assert iterations(root) == [5, 4, 3]
    assert said[0] == "a bad disk" and said[1].startswith(f"kept {root / 'iter_0000003'}")
