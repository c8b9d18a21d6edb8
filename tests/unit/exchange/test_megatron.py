"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, made here as their files are, compute the same once converted."""

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.exchange.files.safe_pickle import load_torch_file
from gptpar.exchange.megatron.arguments import NEEDED
from tests.unit.exchange.hf_models import made_run, refusal
from tests.unit.exchange.megatron_models import (
    GPT2,
    LLAMA,
    Weights,
    arguments,
    of_core,
    of_module,
    of_rank,
    our_model,
    require_same_logits,
    save,
    save_pipelined,
    stages_of,
)


def save_core(root: Path, weights: Weights, flags: str) -> None:
    """Megatron Core's flat names with fused norms, two tensor ranks and two stages."""
    for rank in range(2):
        for stage in range(2):
            here = {name: value for name, value in weights.items() if stages_of(name)[0] == stage}
            state = {of_core(name, 2 * stage): of_rank(name, value, rank) for name, value in here.items()}
            state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3)
            path = root / f"iter_0000030/mp_rank_0{rank}_00{stage}/model_optim_rng.pt"
            save(path, {**beside(flags), "iteration": 30, "model": state})


def nested(weights: Weights, rank: int, key: str) -> dict[str, Any]:
    """The older models' nested dictionaries, all stages in one."""
    embedding: dict[str, Weights] = {}
    encoder: Weights = {}
    for name, value in weights.items():
        _, module, inner = of_module(name).split(".", 2)
        if module == "encoder":
            encoder[inner] = of_rank(name, value, rank)
        else:
            embedding[inner.removesuffix(".weight")] = {"weight": of_rank(name, value, rank)}
    return {"language_model": {"embedding": embedding, key: encoder}}


def beside(flags: str) -> dict[str, Any]:
    return {"args": arguments(flags), "checkpoint_version": 3.0}


def save_old(root: Path, weights: Weights, flags: str) -> None:
    for rank in range(2):
        model = nested(weights, rank, "encoder")
        save(root / f"iter_0000030/mp_rank_0{rank}/model_optim_rng.pt", {**beside(flags), "model": model})


def save_deepspeed(root: Path, weights: Weights, flags: str) -> None:
    for rank in range(2):
        module = nested(weights, rank, "transformer")
        save(root / f"global_step30/mp_rank_0{rank}_model_states.pt", {**beside(flags), "module": module})
    (root / "latest").write_text("global_step30")


def save_pipelined_deepspeed(root: Path, weights: Weights, flags: str) -> None:
    save_pipelined(root / "global_step30", weights, beside(flags))


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
    require_same_logits(made_run(tmp_path), stage, weights)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"hidden_size": 30, "kv_channels": None},
        "its arguments contradict each other: --hidden-size 30 is no multiple of --num-attention-heads 4",
    ),
    (
        {"hidden_size": 16, "kv_channels": 4, "ffn_hidden_size": 64},
        "'layers.0.attention_norm.weight' is [16] in the model, and the 2 ranks have [[32], [32]]",
    ),
    ({"hidden_size": "32"}, "its hidden_size is '32', where a whole number belongs"),
    ({"num_layers": 90}, " bytes, and its arguments describe 4,583,936 bytes"),
    (
        {"norm_epsilon": 0.0, "rotary_base": 0, "hidden_dropout": float("nan")},
        "(?s)rotary_base is 0; it must be more than 0.*norm_epsilon is 0; it must be more than 0.*hidden_drop.* is nan",
    ),
]


def edited(root: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Each rank's file with other contents."""
    for file in (root / "theirs").rglob("*.pt"):
        content = load_torch_file(file)
        file.unlink()  # its tensors are mapped
        save(file, change(content))


def test_arguments_that_contradict_each_other_or_the_tensors_are_told(tmp_path: Path) -> None:
    _, weights = our_model(GPT2)
    save_old(tmp_path / "theirs", weights, GPT2)
    for changed, told in CONTRADICTIONS:
        given = Namespace(**(vars(arguments(GPT2)) | changed))
        edited(tmp_path, lambda content, given=given: content | {"args": given})  # type: ignore[misc]
        assert re.search(told if told.startswith("(?s)") else re.escape(told), refusal(tmp_path)), told


def test_without_arguments_the_file_and_what_to_add_are_told(tmp_path: Path) -> None:
    """What the sentence says suffices to make a model."""
    _, weights = our_model(GPT2)
    save_core(tmp_path / "theirs", weights, GPT2)
    first = min((tmp_path / "theirs").rglob("*.pt"))
    for there, found in ((None, "no 'args'"), ({"num_layers": 4}, "'args' of type dict")):
        edited(tmp_path, lambda content, there=there: content | {"args": there})  # type: ignore[misc]
        told = refusal(tmp_path)
        assert told.startswith(f"{first} holds {found}: the arguments of the run, an argparse.Namespace, describe the ")
        assert f"args=argparse.Namespace({', '.join(f'{name}=...' for name in NEEDED)}), and those" in told
    given = vars(arguments(GPT2))
    edited(tmp_path, lambda content: content | {"args": Namespace(**{name: given[name] for name in NEEDED})})
    made_run(tmp_path)


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    _, weights = our_model(GPT2)
    weights["layers.1.mlp.up.weight"].view(-1)[[0, -1]] = torch.tensor([float("nan"), float("inf")])
    weights["final_norm.weight"][3] = float("nan")
    save_core(tmp_path / "theirs", weights, GPT2)
    assert refusal(tmp_path).endswith(
        "theirs/iter_0000030 has weights that no model can compute with:\n"
        "tensor 'weights/final_norm.weight, part 0' has 1 NaN and 0 infinite values\n"
        "tensor 'weights/layers.1.mlp.up.weight, part 0' has 1 NaN and 0 infinite values\n"
        "tensor 'weights/layers.1.mlp.up.weight, part 1' has 0 NaN and 1 infinite values\n"
        "take weights from before the training failed, or copy or download the files again"
    )
