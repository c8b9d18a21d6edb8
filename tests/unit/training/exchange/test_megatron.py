"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, made here as their files are, compute the same once converted."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint.exchange.safe_pickle import LeftOut, load_torch_file
from gptpar.cli.convert import main as convert
from gptpar.errors import CheckpointError
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, random_tokens, tiny_config
from tests.unit.training.exchange.hf_models import contents, logits_of, our_logits

Weights = dict[str, torch.Tensor]
GPT2 = "--num-layers 4"
LLAMA = (
    "--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --qk-layernorm"
)
OLD = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
FUSED = OLD | {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}


def our_model(flags: str) -> tuple[Stage, Weights]:
    stage = Stage(gpt_model(tiny_config(flags).model).specs)
    weights = {name: torch.empty(p.shape) for name, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), seed=7)
    for name, value in weights.items():
        value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return stage, weights


def arguments(flags: str, **more: Any) -> Namespace:
    model = tiny_config(flags).model
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
        "max_position_embeddings position_embedding_type rotary_base rotary_percent normalization swiglu "
        "add_bias_linear untie_embeddings_and_output_weights qk_layernorm norm_epsilon padded_vocab_size"
    )
    same = {name: getattr(model, name) for name in names.split()}
    return Namespace(
        **same,
        group_query_attention=model.num_query_groups != 4,
        bias_gelu_fusion=True,
        vocab_size=60,
        num_experts=None,
        window_size=None,
        **more,
    )


def of_rank(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    """What the second or first of two tensor ranks has, as Megatron stores it: written down, not asked of gptpar."""
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return value.chunk(2, 1)[rank].clone()
    if ".mlp.up." in name and value.dim() == 3:  # gate and value, one after the other on each rank
        return torch.cat([part.chunk(2, 0)[rank] for part in value])
    if ".qkv." in name or ".mlp.up." in name or name in ("embedding.weight", "output.weight"):
        return value.chunk(2, 0)[rank].clone()
    return value.clone()


def block_name(name: str, table: Mapping[str, str], first: int) -> str:
    """Theirs, with blocks counted from the stage's first one."""
    _, number, inner = name.split(".", 2)
    ours, _, end = inner.rpartition(".")
    theirs = table[ours]
    return f"layers.{int(number) - first}.{theirs}{'' if theirs.endswith('_') else '.'}{end}"


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


def save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


CASES: dict[str, tuple[Callable[[Path, Weights, str], None], str]] = {
    "Megatron Core, GPT-2": (save_core, GPT2),
    "Megatron Core, like Qwen3": (save_core, LLAMA),
    "older Megatron-LM": (save_old, GPT2),
    "Megatron-DeepSpeed": (save_deepspeed, GPT2),
    "Megatron-DeepSpeed, pipeline": (save_pipelined_deepspeed, GPT2),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal_and_the_source_stays_as_it_is(name: str, tmp_path: Path) -> None:
    save_theirs, flags = CASES[name]
    stage, weights = our_model(flags)
    save_theirs(tmp_path / "theirs", weights, flags)
    before = contents(tmp_path / "theirs")
    assert convert([str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    assert contents(tmp_path / "theirs") == before
    tokens = random_tokens(3, 15, 60)
    stage.place({name: value.double() for name, value in weights.items()})
    torch.testing.assert_close(our_logits(tmp_path / "run", tokens), logits_of(stage.eval(), tokens), rtol=0, atol=0)


class Harm:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


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


def test_objects_of_their_programs_are_left_unread(tmp_path: Path) -> None:
    import numpy as np

    torch.save({"args": Namespace(a=1, rng=np.arange(3)), "w": torch.ones(2)}, tmp_path / "a.pt")
    found = load_torch_file(tmp_path / "a.pt")
    assert found["args"].a == 1 and isinstance(found["args"].rng, LeftOut) and torch.equal(found["w"], torch.ones(2))


def test_what_gptpar_does_not_compute_and_what_is_missing_is_told(tmp_path: Path) -> None:
    _, weights = our_model(GPT2)
    save_old(tmp_path / "theirs", weights, GPT2)
    first = tmp_path / "theirs/iter_0000030/mp_rank_00/model_optim_rng.pt"
    content = load_torch_file(first)
    content["args"].apply_layernorm_1p = True
    content["args"].use_rope_scaling = True
    second = tmp_path / "theirs/iter_0000030/mp_rank_01/model_optim_rng.pt"
    torch.save(content | {"model": nested(weights, 1, "encoder")}, second)
    with pytest.raises(CheckpointError, match="(?s)apply-layernorm-1p.*use-rope-scaling"):
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
    second.unlink()
    with pytest.raises(CheckpointError, match="'embedding.weight' is|and the 1 ranks have"):
        convert([str(tmp_path / "theirs"), str(tmp_path / "run")])
