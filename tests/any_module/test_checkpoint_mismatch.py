"""What is said, and what stays, where an engine's checkpoint is damaged or does not fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar
from gptpar.checkpoint import load_meta, read_tensors
from gptpar.errors import CheckpointError
from tests.any_module.checkpointed import LAYOUTS, SCHEDULERS, assert_same, make, mlp, state, train
from tests.any_module.zoo import Mlp

# What does not fit, or is damaged.


class Tied(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize("tied", [True, False])
def test_other_ties_are_told(tmp_path: Path, tied: bool) -> None:
    saved = make(Tied(tied))
    saved.save_checkpoint(tmp_path)
    names = read_tensors(tmp_path / "iter_0000000")
    assert ("weights/two.weight" in names) is not tied
    where = "in the checkpoint, and two or named otherwise here" if tied else "here, and two .* in the checkpoint"
    engine = make(Tied(not tied))
    with pytest.raises(CheckpointError, match=f"two.weight and one.weight are one tensor {where}"):
        engine.load_checkpoint(tmp_path)


def test_other_parameters_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    make(mlp()).save_checkpoint(tmp_path)
    larger, wider = make(Mlp(blocks=4), "ZeRO-3, CPU 0.6"), make(mlp(width=32))
    for engine, sentence in (
        (larger, "'weights/blocks.3.down.bias' is not in the checkpoint"),
        (wider, r"'weights/blocks.0.up.weight' is \[32, 16\] in the checkpoint and \[64, 32\] here"),
    ):
        before = state(engine)
        with pytest.raises(CheckpointError, match=sentence):
            engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert_same(state(engine), before)
    with pytest.raises(CheckpointError, match="group 0 has blocks.3.down.bias.* here only"):
        larger.load_checkpoint(tmp_path)
    before = state(larger)
    larger.load_checkpoint(tmp_path, load_module_strict=False)
    after = state(larger)
    assert torch.equal(after["blocks.3.up.weight"], before["blocks.3.up.weight"])
    assert torch.equal(after["blocks.2.up.weight"], mlp().blocks[2].up.weight)
    larger.save_checkpoint(tmp_path, "larger")
    with pytest.raises(CheckpointError, match="blocks.3.down.bias' is in the checkpoint and nothing asks for it"):
        make(mlp()).load_checkpoint(tmp_path, "larger", load_module_only=True)
    larger.close()


def test_another_schedule_is_told(tmp_path: Path) -> None:
    make(mlp()).save_checkpoint(tmp_path)
    engine = make(mlp(), scheduler=SCHEDULERS["MultiStepLR"])
    with pytest.raises(CheckpointError, match="has no lr_scheduler, and the engine has the lr_scheduler MultiStepLR"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)[0]


def spoil(path: Path) -> None:
    """Change one byte in the middle."""
    file = path / "rank00000.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.fast] * (name == "ZeRO-3, CPU 0.6")) for name in LAYOUTS]
)
def test_a_damaged_one_gives_way_to_an_older_one_or_changes_nothing(tmp_path: Path, layout: str) -> None:
    engine = make(mlp(), layout)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, client_state="old")
    old = state(engine)
    train(engine, 1, 2)
    spoil(Path(engine.save_checkpoint(tmp_path, client_state="new")))
    train(engine, 2, 3)
    before, counts = state(engine), (engine.global_steps, engine.micro_steps)
    with pytest.raises(CheckpointError, match="nothing was loaded(.|\n)*rank00000.bin: tensor '.*CRC-32"):
        engine.load_checkpoint(tmp_path, tag="global_step2")
    assert_same(state(engine), before)
    assert counts == (engine.global_steps, engine.micro_steps)
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "iter_0000001"), "old")
    assert_same(state(engine), old)
    engine.close()


def test_meta_of_a_stranger(tmp_path: Path) -> None:
    engine = make(mlp())
    engine.save_checkpoint(tmp_path)
    meta = load_meta(tmp_path)
    tensors = read_tensors(tmp_path / "iter_0000000")
    before = state(engine)
    wrong = {
        "counts": {"global_steps": -1},
        "groups": [3],
        "scheduler": "no",
        "loss_scale": {"value": "1"},
        "client": 1,
    }
    for number, (name, value) in enumerate(wrong.items(), 1):
        changed = {**meta, name: value, "client": {"__python__": "code", "values": []} if name == "client" else None}
        gptpar.checkpoint.save_checkpoint(tmp_path / name, number, tensors, changed)
        with pytest.raises(CheckpointError, match="code" if name == "client" else f"{name} is"):
            engine.load_checkpoint(tmp_path / name)
    assert_same(state(engine), before)
