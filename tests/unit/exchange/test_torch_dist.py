"""Megatron-LM's torch_dist checkpoints, made by torch.distributed.checkpoint's own writer under Megatron's names."""

import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from gptpar.checkpoint import read_manifest, read_tensors
from gptpar.cli.convert import main as convert
from tests.unit.exchange.hf_models import made_run, refusal
from tests.unit.exchange.megatron_models import (
    GPT2,
    LLAMA,
    Harm,
    Weights,
    arguments,
    of_core,
    our_model,
    require_same_logits,
    save,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def theirs(weights: Weights, *, stacked: bool) -> Weights:
    """Whole tensors by Megatron Core's names; a gated MLP's two parts are one after the other."""
    whole = {of_core(name): value.flatten(0, 1) if value.dim() == 3 else value for name, value in weights.items()}
    if not stacked:
        return whole
    found = {name: value for name, value in whole.items() if ".layers." not in name}
    for name in [name for name in whole if name.startswith("decoder.layers.0.")]:
        layers = [whole[name.replace("layers.0.", f"layers.{layer}.")] for layer in range(4)]
        found[name.replace("layers.0.", "layers.")] = torch.stack(layers)
    return found


class InBoxes(dcp.DefaultSavePlanner):
    """Cuts each tensor in two along every dim, and layers into one each, as the ranks of a layout write them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for name, value in self.state_dict.items() for item in self._items(name, value)])

    def _items(self, name: str, value: torch.Tensor) -> Iterator[WriteItem]:
        for offsets, part in boxes(name, value):
            chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
            data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.shape)
            yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        found = boxes(index.fqn, self.state_dict[index.fqn])
        return next(part for offsets, part in found if torch.Size(offsets) == index.offset).clone()


def boxes(name: str, value: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    found: list[tuple[tuple[int, ...], torch.Tensor]] = [((0,) * value.dim(), value)]
    for dim in range(value.dim()):
        size = 1 if dim == 0 and re.search(r"layers\.[a-z]", name) else -(-value.shape[dim] // 2)
        found = [
            ((*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), part.narrow(dim, start, stop - start))
            for offsets, part in found
            for start in range(0, part.shape[dim], size)
            for stop in [min(start + size, part.shape[dim])]
        ]
    return found


def edited(folder: Path, edit: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def save_torch_dist(folder: Path, state: dict[str, Any], common: dict[str, Any], *, in_boxes: bool) -> None:
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = InBoxes() if in_boxes else None
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), planner=planner, no_dist=True)
    edited(folder, lambda metadata: setattr(metadata, "all_local_plans", [a_plan(state)]))
    save(folder / "common.pt", common)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("30")


def a_plan(state: dict[str, Any]) -> SavePlan:
    """What Megatron leaves in ``.metadata``: objects of other classes of torch, enums and torch's descriptions."""
    named = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    planner = InBoxes()
    planner.state_dict = named
    items = [WriteItem(MetadataIndex("an_object"), WriteItemType.BYTE_IO), *planner.create_local_plan().items]
    return SavePlan(items, planner_data={name: ("model", name) for name in named})


def common_of(flags: str, **more: Any) -> dict[str, Any]:
    return {"args": arguments(flags), "checkpoint_version": 3.0, "iteration": 30, **more}


@pytest.mark.parametrize(
    ("flags", "stacked", "in_boxes"),
    [
        (GPT2, True, True),
        pytest.param(LLAMA, False, True, marks=pytest.mark.slow),
        pytest.param(LLAMA, True, False, marks=pytest.mark.slow),
    ],
)
def test_logits_are_equal_and_the_source_stays_as_it_is(
    flags: str, stacked: bool, in_boxes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, weights = our_model(flags)
    state: dict[str, Any] = theirs(weights, stacked=stacked)
    if not in_boxes:
        state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = {"an": "object"}
        state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(32)  # but for no other weight
    save_torch_dist(tmp_path / "theirs/iter_0000030", state, common_of(flags), in_boxes=in_boxes)
    require_same_logits(made_run(tmp_path), stage, weights)
    assert "it holds weights alone: a run begins with them by" in capsys.readouterr().out


@pytest.mark.slow
def test_the_optimizers_state_comes_along_where_it_is_in_the_weights_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of steps is at one of two places."""
    _, weights = our_model(LLAMA)
    states = {kind: {name: torch.randn(value.shape) for name, value in weights.items()} for kind in MOMENTS}
    state = {name: value.bfloat16() for name, value in theirs(weights, stacked=True).items()}
    for kind, values in {"fp32_param": weights, **states}.items():
        state |= {f"optimizer.state.{kind}.{name}": value for name, value in theirs(values, stacked=True).items()}
    folder = tmp_path / "theirs/iter_0000030"
    save_torch_dist(folder, state, common_of(LLAMA), in_boxes=True)
    for run, step in (("a", {"param_groups": [{"step": 28}]}), ("b", {"state": {"common_step": torch.tensor(28.0)}})):
        common = common_of(LLAMA, optimizer={"optimizer": step}, opt_param_scheduler={"num_steps": 112})
        common["args"].consumed_train_samples = 120
        save(folder / "common.pt", common)
        assert convert([str(tmp_path / "theirs"), str(tmp_path / run)]) == 0
        assert "the optimizer's state after 28 updates" in capsys.readouterr().out
        meta = read_manifest(tmp_path / run / "iter_0000030").meta
        assert meta["optimizer_steps"] == 28
        assert (meta["progress"]["consumed_samples"], meta["progress"]["scheduled_samples"]) == (120, 112)
    stored = read_tensors(tmp_path / "b/iter_0000030")
    for kind, values in {"weights": weights, **states}.items():
        for name, value in values.items():
            assert torch.equal(stored[f"{kind}/{name}"], value), (kind, name)
    assert len(stored) == 3 * len(weights)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    _, weights = our_model(GPT2)
    save_torch_dist(folder / "checkpoint", theirs(weights, stacked=True), common_of(GPT2), in_boxes=True)
    return folder / "checkpoint"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "theirs/iter_0000030")


def test_files_that_would_run_a_command_are_refused(tmp_path: Path, folder: Path) -> None:
    harm = Harm(f"touch {tmp_path / 'harmed'}")
    whole = (folder / ".metadata").read_bytes()
    for protocol in (0, 4):
        (folder / ".metadata").write_bytes(pickle.dumps(harm, protocol))
        assert re.search(r"\.metadata is refused: reading it would call \w+\.system, which may", refusal(tmp_path))
    (folder / ".metadata").write_bytes(b"ctorch\nload\n(V1\ntR.")  # it may name descriptions of tensors only
    assert "would call torch.load" in refusal(tmp_path)
    (folder / ".metadata").write_bytes(whole)
    torch.save({"args": harm}, folder / "common.pt")
    assert "common.pt is refused" in refusal(tmp_path)


@pytest.mark.slow
def test_metadata_that_cannot_be_is_told(tmp_path: Path, folder: Path) -> None:
    whole, name = (folder / ".metadata").read_bytes(), "decoder.layers.mlp.linear_fc2.weight"

    def first(metadata: Any) -> Any:
        return next(place for index, place in metadata.storage_data.items() if index.fqn == name)

    for edit, told in (
        (lambda m: setattr(first(m), "relative_path", "../iter_0000030/__0_0.distcp"), "which is no file of the f"),
        (lambda m: setattr(first(m), "offset", -1), "stands where whole numbers belong"),
        (lambda m: setattr(first(m), "transform_descriptors", ["zstd"]), "is compressed or encrypted"),
        (lambda m: setattr(first(m), "length", 10**15), "it was cut short"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "length", 8), "is said to have 8 bytes"),
        (lambda m: m.state_dict_metadata[name].chunks.pop(), "elements, or overlap"),
        (lambda m: setattr(m.state_dict_metadata[name], "size", torch.Size([4, 32, 127])), "has a part"),
        (lambda m: setattr(m.state_dict_metadata[name], "size", torch.Size([2**40, 2**40])), "no machine can hold"),
        (lambda m: m.storage_data.clear(), "of which nothing says where it is"),
        (lambda m: setattr(m, "state_dict_metadata", [1]), "is damaged"),
        (lambda m: m.state_dict_metadata.update(x=m.state_dict_metadata[name]), "of which nothing says where it is"),
    ):
        edited(folder, edit)
        assert told in refusal(tmp_path), told
        (folder / ".metadata").write_bytes(whole)


@pytest.mark.slow
def test_the_description_may_be_of_megatrons_own_class(tmp_path: Path, folder: Path) -> None:
    metadata = folder / ".metadata"
    text = pickle.dumps(pickle.loads(metadata.read_bytes()), 2)
    ours, theirs = b"torch.distributed.checkpoint.metadata\nMetadata\n", b"MCoreMetadata\n"
    assert text.count(ours) == 1
    metadata.write_bytes(text.replace(ours, b"megatron.core.dist_checkpointing.strategies.torch\n" + theirs))
    made_run(tmp_path)
