"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, made here as their files are, compute the same once converted."""

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.convert import main as convert
from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import LeftOut, load_torch_file
from gptpar.exchange.megatron.arguments import NEEDED
from tests.helpers import random_tokens
from tests.unit.exchange.hf_models import contents, logits_of, our_logits
from tests.unit.exchange.megatron_models import (
    FUSED,
    GPT2,
    LLAMA,
    OLD,
    Harm,
    Weights,
    arguments,
    block_name,
    of_rank,
    our_model,
    save,
)


def save_core(root: Path, weights: Weights, flags: str) -> None:
    """Megatron Core's flat names with fused norms, two tensor ranks and two stages."""
    ends = {
        "embedding.weight": "embedding.word_embeddings.weight",
        "positions.weight": "embedding.position_embeddings.weight",
        "output.weight": "output_layer.weight",
    }
    for rank in range(2):
        for stage in range(2):
            state: dict[str, Any] = {}
            for name, value in weights.items():
                part = of_rank(name, value, rank)
                if name.startswith("layers."):
                    if int(name.split(".")[1]) // 2 == stage:
                        state[f"decoder.{block_name(name, FUSED, 2 * stage)}"] = part
                elif name.startswith("final_norm"):
                    state |= {f"decoder.final_layernorm.{name.split('.')[1]}": part} if stage else {}
                elif stage == (name == "output.weight"):
                    state[ends[name]] = part
            state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3)
            save(
                root / f"iter_0000030/mp_rank_0{rank}_00{stage}/model_optim_rng.pt",
                {"args": arguments(flags), "checkpoint_version": 3.0, "iteration": 30, "model": state},
            )


def nested(weights: Weights, rank: int, key: str) -> dict[str, Any]:
    """The older models' nested dictionaries, all stages in one."""
    encoder = {
        block_name(name, OLD, 0): of_rank(name, value, rank)
        for name, value in weights.items()
        if name.startswith("layers.")
    }
    encoder |= {f"final_layernorm.{end}": weights[f"final_norm.{end}"] for end in ("weight", "bias")}
    embedding = {
        "word_embeddings": {"weight": of_rank("embedding.weight", weights["embedding.weight"], rank)},
        "position_embeddings": {"weight": weights["positions.weight"]},
    }
    return {"language_model": {"embedding": embedding, key: encoder}}


def save_old(root: Path, weights: Weights, flags: str) -> None:
    for rank in range(2):
        save(
            root / f"iter_0000030/mp_rank_0{rank}/model_optim_rng.pt",
            {"args": arguments(flags), "checkpoint_version": 3.0, "model": nested(weights, rank, "encoder")},
        )


def save_deepspeed(root: Path, weights: Weights, flags: str) -> None:
    for rank in range(2):
        save(
            root / f"global_step30/mp_rank_0{rank}_model_states.pt",
            {"args": arguments(flags), "checkpoint_version": 3.0, "module": nested(weights, rank, "transformer")},
        )
    (root / "latest").write_text("global_step30")


def save_pipelined_deepspeed(root: Path, weights: Weights, flags: str) -> None:
    folder = root / "global_step30"
    for rank in range(2):
        embedding = {"word_embeddings.weight": of_rank("embedding.weight", weights["embedding.weight"], rank)}
        positions = {"position_embeddings.weight": weights["positions.weight"]}
        files = {
            1: embedding | positions,
            8: {end: weights[f"final_norm.{end}"] for end in ("weight", "bias")},
            9: embedding,
        }
        for layer in range(4):
            files[3 + layer] = {
                block_name(name, OLD, layer).removeprefix("layers.0."): of_rank(name, value, rank)
                for name, value in weights.items()
                if name.startswith(f"layers.{layer}.")
            }
        for number, state in files.items():
            save(folder / f"layer_0{number}-model_0{rank}-model_states.pt", state)
        save(
            folder / f"mp_rank_0{rank}_model_states.pt",
            {"args": arguments(flags), "checkpoint_version": 3.0, "module": None},
        )


CASES: dict[str, tuple[Callable[[Path, Weights, str], None], str]] = {
    "Megatron Core, GPT-2": (save_core, GPT2),
    "Megatron Core, like Qwen3": (save_core, LLAMA),
    "older Megatron-LM": (save_old, GPT2),
    "Megatron-DeepSpeed": (save_deepspeed, GPT2),
    "Megatron-DeepSpeed, pipeline": (save_pipelined_deepspeed, GPT2),
}
FAST = ("Megatron Core, like Qwen3", "Megatron-DeepSpeed, pipeline")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_logits_are_equal_and_the_source_stays_as_it_is(name: str, tmp_path: Path) -> None:
    save_theirs, flags = CASES[name]
    stage, weights = our_model(flags)
    save_theirs(tmp_path / "theirs", weights, flags)
    before = contents(tmp_path / "theirs")
    assert convert([str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    assert contents(tmp_path / "theirs") == before
    tokens = random_tokens(3, 15, 60)
    stage.place({name: value.double() for name, value in weights.items()})
    found = our_logits(tmp_path / "run", tokens)
    assert found.shape[1] == 64, "Megatron's rows of padding take part in the softmax"
    torch.testing.assert_close(found[:, :60], logits_of(stage.eval(), tokens), rtol=0, atol=0)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_a_command_is_refused(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "theirs/iter_0000001/mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    harm = {"args": arguments(GPT2), "model": Harm(f"touch {tmp_path / 'harmed'}")}
    if zipped:
        torch.save(harm, path)
    else:
        path.write_bytes(pickle.dumps(harm))
    with pytest.raises(CheckpointError, match="is refused: reading it would call .*system" if zipped else "no file of"):
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert {one.name for one in tmp_path.iterdir()} == {"theirs"}


def test_a_file_that_names_another_function_is_refused(tmp_path: Path) -> None:
    """Torch itself blocks those of ``os``, not these."""
    torch.save({"w": torch.ones(2), "model": Harm(str(tmp_path / "harmed"), os.path.basename)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is refused: reading it would call posixpath.basename"):
        load_torch_file(tmp_path / "a.pt")
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


def test_objects_of_their_programs_are_left_unread(tmp_path: Path) -> None:
    import numpy as np

    torch.save({"args": Namespace(a=1, rng=np.arange(3)), "w": torch.ones(2)}, tmp_path / "a.pt")
    found = load_torch_file(tmp_path / "a.pt")
    assert found["args"].a == 1 and isinstance(found["args"].rng, LeftOut) and torch.equal(found["w"], torch.ones(2))


CONTRADICTIONS = {
    "a width that heads do not divide": (
        {"hidden_size": 30, "kv_channels": None},
        "its arguments contradict each other: --hidden-size 30 is no multiple of --num-attention-heads 4",
    ),
    "another width than the tensors'": (
        {"hidden_size": 16, "kv_channels": 4, "ffn_hidden_size": 64},
        "'layers.0.attention_norm.weight' is [16] in the model, and the 2 ranks have [[32], [32]]",
    ),
    "a width that is a text": ({"hidden_size": "32"}, "its hidden_size is '32', where a whole number belongs"),
    "far more layers than bytes": ({"num_layers": 900}, " bytes, and its arguments describe 45,744,896 bytes"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "far more layers than bytes")) for name in CONTRADICTIONS],
)
def test_arguments_that_contradict_each_other_or_the_tensors_are_told(name: str, tmp_path: Path) -> None:
    changed, told = CONTRADICTIONS[name]
    _, weights = our_model(GPT2)
    save_old(tmp_path / "theirs", weights, GPT2)
    for file in (tmp_path / "theirs/iter_0000030").glob("*/model_optim_rng.pt"):
        content = load_torch_file(file)
        vars(content["args"]).update(changed)
        torch.save(content, tmp_path / "new")
        (tmp_path / "new").replace(file)
    with pytest.raises(CheckpointError) as error:
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("there", [None, pytest.param({"num_layers": 4}, marks=pytest.mark.slow)])
def test_without_arguments_the_file_and_what_to_add_are_told(tmp_path: Path, there: object) -> None:
    """What the sentence says suffices to make a model."""
    _, weights = our_model(GPT2)
    save_core(tmp_path / "theirs", weights, GPT2)
    files = {file: load_torch_file(file) for file in sorted((tmp_path / "theirs").rglob("*.pt"))}
    for file, content in files.items():
        file.unlink()  # its tensors are mapped
        save(file, content | {"args": there})
    with pytest.raises(CheckpointError) as caught:
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
    found = "no 'args'" if there is None else "'args' of type dict"
    told = f"{next(iter(files))} holds {found}: the arguments of the run, an argparse.Namespace, describe the model."
    assert str(caught.value).startswith(told)
    assert f"args=argparse.Namespace({', '.join(f'{name}=...' for name in NEEDED)}), and those" in str(caught.value)
    for file, content in files.items():
        file.unlink()
        save(file, content | {"args": Namespace(**{name: getattr(content["args"], name) for name in NEEDED})})
    assert convert([str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0


def test_weights_and_numbers_that_cannot_be_are_told(tmp_path: Path) -> None:
    _, weights = our_model(GPT2)
    weights["layers.1.mlp.up.weight"].view(-1)[[0, -1]] = torch.tensor([float("nan"), float("inf")])
    weights["final_norm.weight"][3] = float("nan")
    save_core(tmp_path / "theirs", weights, GPT2)
    told = (
        r"(?s)theirs/iter_0000030 has weights that no model can compute with:\n"
        r"tensor 'weights/final_norm.weight, part 0' has 1 NaN and 0 infinite values\n"
        r"tensor 'weights/layers.1.mlp.up.weight, part 0' has 1 NaN and 0 infinite values\n"
        r"tensor 'weights/layers.1.mlp.up.weight, part 1' has 0 NaN and 1 infinite values\ntake weights from before"
    )
    with pytest.raises(CheckpointError, match=told):
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    for path in (tmp_path / "theirs").rglob("*.pt"):
        content = load_torch_file(path)
        vars(content["args"]).update(norm_epsilon=0.0, rotary_base=0, hidden_dropout=float("nan"))
        path.unlink()  # its tensors are mapped
        torch.save(content, path)
    told = (
        "(?s)rotary_base is 0; it must be more than 0.*norm_epsilon is 0; it must be more than 0.*hidden_drop.* is nan"
    )
    with pytest.raises(CheckpointError, match=told):
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
