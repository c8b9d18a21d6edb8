"""Hugging Face folders in which something is wrong: a sentence with a remedy, and the folder stays as it is."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import read_tensors
from gptpar.cli.convert import main as convert
from gptpar.errors import CheckpointError
from gptpar.exchange.hf_folder import open_hf, shapes_of
from gptpar.exchange.hf_import import fill_from_hf
from gptpar.topology.tensor_parts import whole
from tests.unit.exchange.hf_models import made_hf, made_run, refusal, save_theirs

safetensors = pytest.importorskip("safetensors.torch")

AGAIN = "copy or download these files again"
SAME = "take config.json and all weight files from the same model"


def edited(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def shard(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda folder: change(sorted(folder.glob("model-*.safetensors"))[2])


def with_tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """A change of one tensor; `None`: it is taken out."""

    def change(folder: Path) -> None:
        for path in folder.glob("model-*.safetensors"):
            tensors = safetensors.load_file(path)
            if name in tensors or path.name.startswith("model-00001"):
                tensors = {key: one for key, one in tensors.items() if key != name}
                if value is not None and path.name.startswith("model-00001"):
                    tensors[name] = value
                safetensors.save_file(tensors, path, metadata={"format": "pt"})

    return change


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 123\n"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a family that is not known": (edited(model_type="mamba"), "model_type 'mamba' is not known; gptpar knows gpt2"),
    "another family": (edited(model_type="qwen2"), SAME),
    "a shard is missing": (shard(Path.unlink), AGAIN),
    "a shard is a pointer": (shard(lambda path: path.write_text(POINTER)), "not the file: fetch it with git lfs pull"),
    "a tensor too many": (with_tensor("model.layers.0.adapter.weight", torch.ones(3)), SAME),
    "an activation and a form of positions that nobody computes": (
        edited(hidden_act="mish", rope_parameters={"rope_type": "su"}),
        "(?s)hidden_act is 'mish'.*rope_type is",
    ),
    "too few layers": (
        edited(num_hidden_layers=2),
        "'model.layers.2.input_layernorm.weight' is not a weight of gptpar's llama model",
    ),
    "far too many layers": (edited(num_hidden_layers=10**12), "1000000000000 layers"),
    "another width": (edited(intermediate_size=47), r"is \[48, 32\], and \[47, 32\] follows from config.json"),
    "a width that heads do not divide": (edited(hidden_size=33), "hidden"),
    "said to be tied": (
        edited(tie_word_embeddings=True),
        "'lm_head.weight' has another shape, format or values than 'model.embed_tokens.weight': set it to false",
    ),
    "said to be untied": (with_tensor("lm_head.weight", None), "set tie_word_embeddings to true in a copy"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    save_theirs(folder, "Llama", max_shard_size="20KB")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A sound one in shards."""
    return shutil.copytree(written, tmp_path / "theirs")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_told_with_a_remedy_and_stays_as_it_is(name: str, folder: Path, tmp_path: Path) -> None:
    change, told = WRONG[name]
    change(folder)
    assert re.search(told, refusal(tmp_path))


@pytest.mark.parametrize("load", [False, True], ids=["convert", "--load-hf"])
def test_weights_that_are_not_finite_are_named_with_their_number(load: bool, tmp_path: Path) -> None:
    model = save_theirs(tmp_path / "theirs", "Llama")
    values = dict(model.named_parameters())
    values["lm_head.weight"].data.view(-1)[-3:] = -float("inf")
    values["model.norm.weight"].data[0] = float("nan")
    model.float().save_pretrained(tmp_path / "theirs")
    if load:
        opened = open_hf(tmp_path / "theirs")
        shapes = shapes_of(opened.model)
        with pytest.raises(CheckpointError) as error:
            fill_from_hf(opened, {name: whole(torch.empty(shape)) for name, shape in shapes.items()})
    assert (str(error.value) if load else refusal(tmp_path)).splitlines() == [
        f"{tmp_path / 'theirs'} has weights that no model can compute with:",
        "tensor 'lm_head.weight' has 0 NaN and 3 infinite values",
        "tensor 'model.norm.weight' has 1 NaN and 0 infinite values",
        "take weights from before the training failed, or copy or download the files again",
    ]


def test_a_head_that_repeats_the_tied_embedding_is_fine_and_generation_config_may_lack(
    folder: Path, tmp_path: Path
) -> None:
    weights = [safetensors.load_file(path) for path in folder.glob("*.safetensors")]
    (embedding,) = [one["model.embed_tokens.weight"] for one in weights if "model.embed_tokens.weight" in one]
    with_tensor("lm_head.weight", embedding)(folder)
    edited(tie_word_embeddings=True)(folder)
    (folder / "generation_config.json").unlink()
    assert "weights/output.weight" not in read_tensors(made_run(tmp_path) / "iter_0000000")
    assert (made_hf(tmp_path) / "generation_config.json").is_file()


def test_what_convert_cannot_begin_with_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"theirs/run lies in .*theirs, which stays as it is: choose"):
        convert([str(tmp_path / "theirs"), str(tmp_path / "theirs/run")])
    (tmp_path / "out").mkdir()
    (tmp_path / "theirs").rename(tmp_path / "out/checkpoint-100")
    with pytest.raises(CheckpointError, match="--dtype, --no-tokenizer: for checkpoints of gptpar only"):
        convert([str(tmp_path / "out"), str(tmp_path / "run"), "--dtype", "bf16", "--no-tokenizer"])
    with pytest.raises(CheckpointError, match=r"out holds a Hugging Face model \(checkpoint-100\): give .*point-100$"):
        convert([str(tmp_path / "out"), str(tmp_path / "run")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds no checkpoint, which gptpar cannot convert: give"):
        convert([str(tmp_path / "empty"), str(tmp_path / "run")])
