"""What an engine's checkpoint keeps, what it replaces, and what is said where it does not fit."""

import argparse
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gptpar.checkpoint import read_tensors
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.deepspeed.fp32_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from gptpar.errors import CheckpointError, ConfigError
from tests.any_module.checkpointed import LAYOUTS, SCHEDULERS, assert_go_on_alike, assert_same, make, mlp, state, train
from tests.any_module.matrix import Bench
from tests.any_module.zoo import Mlp


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param("fp32", "ZeRO-3, CPU 0.6", marks=pytest.mark.fast),
        *(("bf16", "ZeRO-2, CPU 1"), ("fp16", "ZeRO-0"), ("fp16", "ZeRO-3, CPU 0.6")),
    ],
)
def test_number_formats(tmp_path: Path, precision: str, layout: str) -> None:
    """Everything is there to the bit, and the steps that follow are the uninterrupted run's, skipped ones included."""
    saved = make(mlp(), precision=precision)
    first_scale = saved.loss_scaler.value
    train(saved, 0, 3)
    for _ in range(2 * (precision == "fp16")):  # overflow: hysteresis, then half the scale
        saved.backward(saved(torch.full((2, 16), 6e4, dtype=torch.float16)).float().sum() * 1e30)
        saved.step()
    saved.save_checkpoint(tmp_path)
    loaded = make(mlp(7), layout, precision=precision)
    train(loaded, 5, 6)
    path, client = loaded.load_checkpoint(tmp_path)
    assert path == str(tmp_path / f"iter_{saved.global_steps:07}") and client == {}
    counts = [
        (one.global_steps, one.skipped_steps, one.micro_steps, one.engine.optimizer.steps_taken)
        for one in (loaded, saved)
    ]
    assert counts[0] == counts[1] and loaded.loss_scaler == saved.loss_scaler
    if precision == "fp16":
        assert loaded.global_steps == 5 and loaded.skipped_steps >= 2 and 1 <= loaded.loss_scaler.value < first_scale
    assert counts[0][3] == loaded.global_steps - loaded.skipped_steps
    assert_go_on_alike(loaded, saved, 3, 6)


def test_another_number_format(tmp_path: Path) -> None:
    """Master weights are fp32 under bf16, fp16 and fp32: nothing is rounded on the way."""
    saved = make(mlp(), precision="bf16")
    train(saved, 0, 3)
    saved.save_checkpoint(tmp_path)
    loaded = make(mlp(7), "ZeRO-3, CPU 0.6")
    loaded.load_checkpoint(tmp_path)
    for name, value in state(loaded).items():
        if "/" in name:  # a master weight or a moment
            assert torch.equal(value, state(saved)[name]), name
    loaded.close()


class WithBuffers(Mlp):
    """Buffers of all kinds, one under two names, and state of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.blocks[0].register_buffer("shared", self.count)
        self.words: Any = ("none",)

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def test_buffers_and_extra_state(tmp_path: Path) -> None:
    saved = make(WithBuffers())
    module = saved.module
    module.count += 3
    module.waves += 1 + 2j
    module.mask[1] = True
    module.passing += 5
    module.words = ("one", 2)
    saved.save_checkpoint(tmp_path)
    loaded = make(WithBuffers(), "ZeRO-3, CPU 0.6")
    count = loaded.module.count
    loaded.load_checkpoint(tmp_path)
    assert loaded.module.count is count is loaded.module.blocks[0].shared and count.item() == 3
    assert loaded.module.waves.tolist() == [1 + 2j] * 3 and loaded.module.mask.tolist() == [False, True]
    assert loaded.module.passing.tolist() == [0, 0] and loaded.module.words == ("one", 2)
    names = [name for name in read_tensors(tmp_path / "iter_0000000") if name.startswith("buffers/")]
    assert names == ["buffers/count", "buffers/waves", "buffers/mask"]
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert weights["waves"].tolist() == [1 + 2j] * 3 and weights["blocks.0.shared"].item() == 3
    loaded.close()


def frozen(model: Mlp) -> Mlp:
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(("precision", "host_parameters"), [("fp32", True), ("bf16", False)])
def test_frozen_on_one_side_only(tmp_path: Path, precision: str, host_parameters: bool) -> None:
    """Weights fit whether they are trained or frozen; moments that are on one side only are told of."""
    saved = make(frozen(mlp()), "ZeRO-3, CPU 0.6", precision=precision, host_parameters=host_parameters)
    train(saved, 0, 2)
    saved.save_checkpoint(tmp_path, tag="frozen")
    loaded = make(mlp(7), precision=precision)
    with pytest.raises(CheckpointError, match=r"blocks\.1(.|\n)*load_optimizer_states=False"):
        loaded.load_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path, load_optimizer_states=False)
    wanted = saved.module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.module.state_dict().items())
    train(loaded, 2, 4)
    loaded.save_checkpoint(tmp_path, tag="thawed")
    saved.load_checkpoint(tmp_path, tag="thawed", load_module_only=True)
    wanted = loaded.module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in saved.module.state_dict().items())
    assert saved.global_steps == 2 and saved.engine.optimizer.steps_taken == 2
    saved.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.fast] * (name == "SequentialLR")) for name in SCHEDULERS]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedulers(tmp_path: Path, name: str) -> None:
    """Rates and betas after loading are those of the uninterrupted run."""
    saved = make(mlp(), scheduler=SCHEDULERS[name])
    train(saved, 0, 3)
    saved.save_checkpoint(tmp_path)
    loaded = make(mlp(7), "ZeRO-3, CPU 0.6", scheduler=SCHEDULERS[name])
    loaded.load_checkpoint(tmp_path)
    for step in range(3, 7):
        train(saved, step, step + 1)
        train(loaded, step, step + 1)
        groups = [[{**group, "params": 0} for group in one.optimizer.param_groups] for one in (saved, loaded)]
        assert groups[0] == groups[1]
    assert_same(state(loaded), state(saved))
    loaded.close()


def test_groups_go_on_with_their_numbers(tmp_path: Path) -> None:
    def two(model: Mlp) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 1e-3, "betas": (0.8, 0.9), "word": "first"}, {"params": others}]

    model = mlp()
    saved = make(model, groups=two(model))
    train(saved, 0, 1)
    saved.optimizer.param_groups[1]["lr"] = torch.tensor(0.125)  # is saved as the number
    saved.save_checkpoint(tmp_path)
    model = mlp(7)
    loaded = make(model, groups=two(model))
    loaded.optimizer.param_groups[0].update(lr=torch.tensor(9.0), betas=(0.1, 0.2), word="other")
    rate = loaded.optimizer.param_groups[0]["lr"]
    loaded.load_checkpoint(tmp_path)
    first, second = loaded.optimizer.param_groups
    assert first["lr"] is rate and rate.item() == pytest.approx(1e-3)
    assert (first["betas"], first["word"], second["lr"]) == ((0.8, 0.9), "first", 0.125)
    with pytest.raises(CheckpointError, match=r"the checkpoint has 2 parameter group\(s\), and the engine has 1"):
        make(mlp()).load_checkpoint(tmp_path)
    model = mlp()
    first, *others = model.parameters()
    with pytest.raises(
        CheckpointError, match="group 0 has first.weight in the checkpoint only(.|\n)*group 0 has last.b"
    ):
        make(model, groups=[{"params": others[-1:]}, {"params": [first, *others[:-1]]}]).load_checkpoint(tmp_path)


def test_what_cannot_be_stored_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    engine = make(mlp())
    engine.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(
        CheckpointError, match=r"param_groups\[0\]\['odd'\] is of type.*object; client_state\['x'\] is a ten"
    ):
        engine.save_checkpoint(tmp_path, client_state={"x": torch.zeros(2).to_sparse()})
    assert not list(tmp_path.iterdir())


def test_tensors_and_small_objects_of_the_user_come_back_to_the_bit(tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    client = {
        "rng": torch.get_rng_state(),
        "numpy": ("MT19937", draws.integers(0, 2**32, 624, dtype=np.uint32), np.float32(0.1), np.zeros((2, 0))),
        "tensors": [
            torch.tensor([float("nan"), -0.0, 1e-40]),
            torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
            torch.tensor([1 + 2j]),
            torch.tensor(True),
            torch.zeros(0, 3, dtype=torch.int64),
            nn.Parameter(torch.ones(2)),
        ],
        "args": argparse.Namespace(lr=1e-3, seen={3, 4}, path=Path("a/b"), dtype=torch.bfloat16),
        7: OrderedDict(b=torch.Size([2, 3]), a=b"\0\xff"),
        "plain": {"a": (1, [2.5, None]), 3: {"x": True}, "n": float("inf"), "__python__": "mine"},
        "counts": Counter([2, 2]),
    }
    saved = make(mlp(), precision="bf16")
    saved.save_checkpoint(tmp_path, client_state=client)
    client["tensors"][0].zero_()
    _, back = make(mlp(7), "ZeRO-3, CPU 0.6", precision="bf16").load_checkpoint(tmp_path)
    client["tensors"][0] = torch.tensor([float("nan"), -0.0, 1e-40])
    for one, other in zip(back["tensors"], client["tensors"], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        bits = [t.detach().contiguous().view(-1).view(torch.uint8).tolist() for t in (one, other)]
        assert bits[0] == bits[1]
    assert torch.equal(back["rng"], client["rng"]) and back["args"] == client["args"] and back[7] == client[7]
    assert back["plain"] == client["plain"] and back["counts"] == client["counts"]
    kinds = [OrderedDict, torch.Size, np.float32, tuple, Counter]
    assert [
        type(back[7]),
        type(back[7]["b"]),
        type(back["numpy"][2]),
        type(back["plain"]["a"]),
        type(back["counts"]),
    ] == kinds
    for one, other in zip(back["numpy"][1:], client["numpy"][1:], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


def test_whole_fp32_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """DeepSpeed's ``zero_to_fp32``: master weights, one file or several, with and without frozen weights."""
    saved = make(frozen(mlp()), "ZeRO-3, CPU 0.6", precision="bf16")
    train(saved, 0, 2)
    saved.save_checkpoint(tmp_path, tag="mine")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    parameters = dict(saved.module.named_parameters())
    assert found.keys() == parameters.keys() and {value.dtype for value in found.values()} == {torch.float32}
    for name, value in found.items():
        master = saved.weights.whole_here(name, "weights")
        wanted = saved.module.state_dict()[name].float() if master is None else master
        assert torch.equal(value, wanted), name
    trained = {name for name, p in parameters.items() if p.requires_grad}
    without_frozen = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "mine", exclude_frozen_parameters=True)
    assert without_frozen.keys() == trained < found.keys()
    model = load_state_dict_from_zero_checkpoint(mlp(7), tmp_path)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    for size, safe in (("5GB", False), ("2KB", False), ("2KB", True)):
        out = tmp_path / f"{size}-{safe}"
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, size, safe)
        files = sorted(out.glob("*.bin")) + sorted(out.glob("*.safetensors"))
        assert (len(files) > 1) == (size == "2KB")
        state = {k: v for f in files for k, v in (load_file(f) if safe else torch.load(f)).items()}
        assert state.keys() == found.keys() and all(torch.equal(value, found[name]) for name, value in state.items())
        for index in out.glob("*.index.json"):
            assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    with pytest.raises(ConfigError, match="max_shard_size 'big' is no number of bytes"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", "big")
    with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "none")
    check_that_frozen_weights_can_be_left_out(saved, trained, tmp_path / "trained")
    saved.close()


def check_that_frozen_weights_can_be_left_out(saved: ModuleEngine, trained: set[str], folder: Path) -> None:
    saved.save_checkpoint(folder, exclude_frozen_parameters=True)
    here = {name.removeprefix("weights/") for name in read_tensors(folder / "iter_0000002") if name[:7] == "weights"}
    assert here == trained
    loaded = make(frozen(mlp(7)), precision="bf16")
    before, wanted = loaded.module.state_dict(), saved.module.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(CheckpointError, match=r"blocks\.1(.|\n)*load_module_strict=False"):
        loaded.load_checkpoint(folder)
    loaded.load_checkpoint(folder, load_module_strict=False)
    for name, value in loaded.module.state_dict().items():
        assert torch.equal(value, (wanted if name in trained else before)[name]), name


# Plain torch's weights, and several processes.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_weights_go_in_and_through(tmp_path: Path, layout: str) -> None:
    """``module.load_state_dict`` of plain torch's weights, then a checkpoint of them."""
    plain = mlp(3).state_dict()
    engine = make(mlp(), layout, precision="bf16", host_parameters=layout.startswith("ZeRO-3"))
    train(engine, 0, 1)
    engine.module.load_state_dict(plain)
    engine.save_checkpoint(tmp_path, tag="plain")
    loaded = make(mlp(7), "ZeRO-3, CPU 0.6", precision="bf16")
    loaded.load_checkpoint(tmp_path)
    for name, value in loaded.module.state_dict().items():
        assert torch.equal(value, plain[name].bfloat16()), name
    assert_go_on_alike(loaded, engine, 1, 4)


@pytest.mark.fast
def test_weights_changed_in_place_are_saved_and_old_changes_are_forgotten(tmp_path: Path) -> None:
    engine = make(mlp(), precision="bf16")
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "first")
    wanted = state(engine)
    with torch.no_grad():
        engine.module.last.bias.fill_(0.5)
    engine.save_checkpoint(tmp_path, "second")
    assert (read_tensors(tmp_path / "iter_0000002")["weights/last.bias"] == 0.5).all()
    with torch.no_grad():
        engine.module.last.weight.fill_(0.5)
    engine.load_checkpoint(tmp_path, "first")
    assert_same(state(engine), wanted)
    train(engine, 1, 2)
    reference = make(mlp(), precision="bf16")
    train(reference, 0, 2)
    assert_same(state(engine), state(reference))


def on_two(rank: int, folder: str) -> list[str]:
    """What is said on each rank, and what is kept of each rank's own."""
    engine, said = make(WithBuffers(), "ZeRO-3, CPU 0.6", checkpoint={"tag_validation": "Fail"}), []
    engine.module.count.fill_(rank + 5)
    for act in (
        lambda: engine.save_checkpoint(folder, tag=f"of {rank}"),
        lambda: engine.save_checkpoint(folder, client_state={"x": print} if rank == 0 else {}),
        lambda: engine.load_checkpoint(folder, tag="none"),
    ):
        with pytest.raises(CheckpointError) as error:
            act()
        assert isinstance(error.value, AssertionError) == (not said)  # DeepSpeed asserts equal tags
        said.append(str(error.value))
    engine.save_checkpoint(folder, client_state={"rank": rank, "rng": torch.full((2,), rank)})
    engine.module.count.zero_()
    _, client = engine.load_checkpoint(folder)
    said += [str(client["rank"]), str(client["rng"].tolist()), str(engine.module.count.item())]
    engine.close()
    return said


def test_on_several_processes(bench: Bench, tmp_path: Path) -> None:
    one, other = bench.on_ranks(2, on_two, str(tmp_path))
    assert one == other
    assert "'of 0' on rank 0, 'of 1' on rank 1" in one[0] and "client_state['x']" in one[1]
    assert "no checkpoint of the tag 'none'" in one[2] and one[3:] == ["0", "[0, 0]", "5"]
