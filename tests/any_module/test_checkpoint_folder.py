"""An engine's checkpoints by their names, what else may lie in their folder, and what is damaged or does not fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar
from gptpar.checkpoint import find_checkpoints, load_meta, read_tensors
from gptpar.cli.inspect import main as inspect
from gptpar.cli.runs import main as runs
from gptpar.errors import CheckpointError
from tests.any_module.checkpointed import LAYOUTS, SCHEDULERS, assert_same, make, mlp, state, train
from tests.any_module.zoo import Mlp

# Names, tags and folders.


def test_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tag is replaced by a later save of that name; without one, what was saved last counts."""
    engine = make(mlp())
    engine.save_checkpoint(tmp_path, tag="best", client_state=0)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="best", client_state=1)  # of the same step
    assert [number for number, _ in find_checkpoints(tmp_path)] == [3, 2]
    assert (tmp_path / "latest").read_text() == "best"
    train(engine, 2, 3)
    engine.save_checkpoint(tmp_path, tag="aside", client_state=2, save_latest=False)
    assert engine.load_checkpoint(tmp_path)[1] == 1 and engine.global_steps == 2
    assert engine.load_checkpoint(tmp_path, "aside")[1] == 2 and engine.global_steps == 3
    assert engine.load_checkpoint(tmp_path, "global_step2")[1] == {}
    (tmp_path / "latest").unlink()
    assert engine.load_checkpoint(tmp_path)[1] == 2
    with pytest.raises(
        CheckpointError, match="no checkpoint of the tag 'worst'; it has 'aside', 'best', 'global_step2'"
    ):
        engine.load_checkpoint(tmp_path, "worst")
    assert engine.load_checkpoint(tmp_path / "none") == (None, {})
    with pytest.raises(CheckpointError, match="'a\\\\nb' is no name"):
        engine.save_checkpoint(tmp_path, "a\nb")
    with pytest.raises(CheckpointError, match=f"is itself a checkpoint: give {tmp_path}"):
        engine.load_checkpoint(tmp_path / "iter_0000003")
    (file := tmp_path / "state.txt").write_text("")
    for verb in (engine.load_checkpoint, engine.save_checkpoint):  # neither "nothing is there" nor a full disk
        with pytest.raises(CheckpointError) as refused:
            verb(file)
        assert str(refused.value) == f"{file} is a file: give the folder of an engine's checkpoints."
    assert inspect([str(tmp_path)]) == 0 and inspect([str(tmp_path / "iter_0000003"), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "tag best" in told and "weights/blocks.0.up.weight" in told and "every byte of" in told
    assert runs([str(tmp_path), "--verify"]) == 0


@pytest.mark.fast
def test_a_tag_like_a_checkpoints_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a tag, and no number: neither a link of that name nor later checkpoints are counted by it."""
    engine = make(mlp())
    for client in (1, 2):
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="iter_0000200", client_state=client)
        for tag in (None, "iter_0000200"):
            assert engine.load_checkpoint(tmp_path, tag) == (str(tmp_path / f"iter_000000{client}"), client)
    engine.save_checkpoint(tmp_path, tag="iter_200")
    assert [number for number, _ in find_checkpoints(tmp_path)] == [3, 2] and (tmp_path / "iter_200").is_symlink()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("iter_0000200")]
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.fast
def test_another_seed_is_not_taken_for_the_same_checkpoint(tmp_path: Path) -> None:
    make(mlp(0)).save_checkpoint(tmp_path)
    other = make(mlp(1))
    other.save_checkpoint(tmp_path)
    loaded = make(mlp(2))
    loaded.load_checkpoint(tmp_path)
    assert_same(state(loaded), state(other))
    assert len(find_checkpoints(tmp_path)) == 1


def test_strangers_folders_are_left_alone(tmp_path: Path) -> None:
    engine = make(mlp())
    theirs = tmp_path / "theirs"
    (theirs / "global_step10").mkdir(parents=True)
    (theirs / "global_step10" / "mp_rank_00_model_states.pt").touch()
    (theirs / "latest").write_text("global_step10")
    before = sorted(theirs.rglob("*"))
    for act in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match="holds a (DeepSpeed|Megatron-LM) checkpoint"):
            act(theirs)
    (theirs / "best.pt").touch()  # beside their checkpoint, it does not hide that
    with pytest.raises(CheckpointError, match="holds a (DeepSpeed|Megatron-LM) checkpoint"):
        engine.save_checkpoint(theirs)
    assert sorted({*theirs.rglob("*")} - {theirs / "best.pt"}) == before
    run = tmp_path / "run"
    gptpar.checkpoint.save_checkpoint(run, 10, {"weights/x": torch.zeros(1)}, {"config": {}})
    with pytest.raises(CheckpointError, match="of a run of gptpar pretrain"):
        engine.save_checkpoint(run)
    with pytest.raises(CheckpointError, match="is no engine's"):
        engine.load_checkpoint(run)


def test_files_that_a_program_saves_beside_its_checkpoints(tmp_path: Path) -> None:
    names = ("best.pt", "last.ckpt", "pytorch_model.bin", "det_state_dict_rank0.pth")
    for name in names:
        (tmp_path / name).write_bytes(b"theirs")
    engine, loaded = make(mlp(0)), make(mlp(1))
    engine.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    assert_same(state(loaded), state(engine))
    assert all((tmp_path / name).read_bytes() == b"theirs" for name in names)


def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """A save has the state before the step, which goes on; loading forgets the gradients at work."""
    engine = make(mlp(), "ZeRO-3, CPU 0.6", accumulation=2)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    wanted, uninterrupted = state(engine), train(engine, 1, 2)
    after = state(engine)
    engine.load_checkpoint(tmp_path)
    first, second = (torch.full((2, 16), value) for value in (1.0, -2.0))
    ends = []
    for saves in (False, True):
        engine.backward(engine(first).square().mean())
        for _ in range(saves):
            with pytest.warns(UserWarning, match="in the middle of a step, 0 of its 2 micro-batches"):
                engine.save_checkpoint(tmp_path, "first")
        engine.step()
        for _ in range(saves):
            with pytest.warns(UserWarning, match="in the middle of a step, 1 of its 2 micro-batches"):
                engine.save_checkpoint(tmp_path, "second")
        engine.backward(engine(second).square().mean())
        with pytest.raises(CheckpointError, match="call engine.step.. first"):
            engine.save_checkpoint(tmp_path)
        engine.step()
        ends.append(state(engine))
        engine.load_checkpoint(tmp_path, "second" if saves else None)
        assert_same(state(engine), wanted)
    assert_same(ends[0], ends[1])
    engine.load_checkpoint(tmp_path, "first")
    assert engine.micro_steps == 2
    assert train(engine, 1, 2) == uninterrupted
    assert_same(state(engine), after)
    engine.close()


# What does not fit, or is damaged.


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
    kinds = (("code", []), ("tensor", "client/0"), ("dict", [[[1], 2]]), ("dtype", "load"))
    wrong = [
        ("counts", {"global_steps": -1}, "counts is"),
        ("groups", [3], "groups is"),
        ("scheduler", "no", "scheduler is"),
        ("loss_scale", {"value": "1"}, "loss_scale is"),
        *(("client", {"__python__": kind, "values": values}, f"__python__.*{kind}") for kind, values in kinds),
    ]
    for number, (name, value, sentence) in enumerate(wrong, 1):
        folder = tmp_path / str(number)
        gptpar.checkpoint.save_checkpoint(folder, number, tensors, {**meta, "client": None, name: value})
        with pytest.raises(CheckpointError, match=sentence):
            engine.load_checkpoint(folder)
    assert_same(state(engine), before)
