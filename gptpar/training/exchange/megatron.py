"""Checkpoints of Megatron-LM (its legacy format) and of Megatron-DeepSpeed: their weights, put together from all ranks.

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt       Megatron-LM, tensor rank TT, pipeline rank PPP
    global_step10/mp_rank_TT_model_states.pt               Megatron-DeepSpeed without a pipeline, ZeRO up to stage 2
    global_step10/layer_LL-model_TT-model_states.pt        Megatron-DeepSpeed with a pipeline

Their QKV rows are ordered by group, as ours are, since version 2 of their checkpoints. A rank's part of a parameter has
the elements of the part that our parameter's declared placement gives to that tensor rank; so parts are joined along
the declared dim.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.exchange.new_folder import new_folder, why_not_new
from gptpar.checkpoint.exchange.safe_pickle import load_torch_file
from gptpar.checkpoint.streamed import StreamedTensor, write_checkpoint
from gptpar.config import Flags, ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.checks.model import check_model
from gptpar.config.complete import complete_model
from gptpar.errors import CheckpointError, ConfigError, printable
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import ParameterInfo, Stage
from gptpar.training.exchange.hf_folder import MAX_LAYERS
from gptpar.training.exchange.meta import converted_meta

Weights = Mapping[str, torch.Tensor]

OURS = {
    "word_embeddings.weight": "embedding.weight",
    "position_embeddings.weight": "positions.weight",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer.weight": "output.weight",
    "lm_head.weight": "output.weight",
}
"""Names around the blocks; a name without ``weight`` stands for all of its parameters."""

OURS_IN_BLOCK = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.dense": "attention.out",
    "attention.dense": "attention.out",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
}
"""Names within a block, of Megatron-LM's older layers, of Megatron Core and of its fused layers; the first fits."""

ABSENT_HERE = {
    "num_experts": "mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "apply_layernorm_1p": "norms whose weights are stored less one",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "rotary_interleaved": "interleaved rotary pairs",
    "use_rope_scaling": "scaled rotary positions",
    "qk_clip": "clipped attention logits",
    "mtp_num_layers": "multi-token prediction",
}
"""Arguments of Megatron that must be off."""

PLAIN = (bool, int, float, str)
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}

_CHECKPOINT = r"(iter_|global_step)(\d{1,18})"
_PREFIX = re.compile(r"(module|model|language_model|embedding|encoder|decoder|transformer)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class MegatronModel:
    """A model whose files have been opened and checked.

    Attributes:
        infos: our global name -> shape and placement.
        parts: our global name -> each tensor rank's part.
        vocab_size: token ids without padding, where the arguments say it.
    """

    model: ModelConfig
    infos: Mapping[str, ParameterInfo]
    parts: Mapping[str, list[torch.Tensor]]
    vocab_size: int | None

    def parameter(self, name: str) -> torch.Tensor:
        """One of our parameters in fp32, or in fp64 where theirs is."""
        shape, split, parts = self.infos[name].shape, self.infos[name].split, self.parts[name]
        if split is None:
            whole = parts[0].reshape(shape)
        else:
            before, after = shape[: split.dim], shape[split.dim + 1 :]
            whole = torch.cat([part.reshape(*before, -1, *after) for part in parts], split.dim)
        return whole.to(torch.float64 if whole.dtype == torch.float64 else torch.float32)


def open_megatron(folder: Path) -> MegatronModel:
    """Open a checkpoint folder, or the newest in a folder of checkpoints; tensors are not read yet.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """
    path, ranks = _files(folder)
    arguments, version, by_rank = _read(path, ranks)
    if version < 2:
        raise CheckpointError(
            f"{path} is of version {version} of Megatron's checkpoints, whose QKV rows are in another order; load and "
            "save it with a newer Megatron-LM once"
        )
    rows = sum(len(weights.get("embedding.weight", ())) for weights in by_rank)
    model = _model_of(arguments, rows, path)
    infos = Stage(gpt_model(model).specs).infos()
    parts: dict[str, list[torch.Tensor]] = {}
    for weights in by_rank:
        for name, tensor in weights.items():
            parts.setdefault(name, []).append(tensor)
    if model.tied:
        parts.pop("output.weight", None)
    if problems := list(_mismatches(parts, infos, len(by_rank))):
        raise CheckpointError(f"the weights in {path} are not those of its arguments:\n" + "\n".join(problems[:8]))
    size = getattr(arguments, "vocab_size", None)
    return MegatronModel(model, infos, parts, size if type(size) is int else None)


def import_megatron(source: Path, target: Path) -> Path:
    """Make a checkpoint of iteration 0 of a Megatron model, parameter by parameter; the source stays as it is.

    Args:
        target: a new folder of checkpoints.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: with what is wrong.
    """
    if problem := why_not_new(target):
        raise CheckpointError(problem)
    model = open_megatron(source)
    tensors = (StreamedTensor(f"weights/{name}", partial(model.parameter, name)) for name in model.infos)
    size = model.vocab_size if model.vocab_size and model.vocab_size <= model.model.padded_vocab_size else None
    tokenizer = TokenizerConfig(vocab_size=size or model.model.padded_vocab_size)
    with new_folder(target) as folder:
        path = write_checkpoint(folder, 0, tensors, converted_meta(model.model, tokenizer, "megatron"))
    return target / path.name


FILES = (
    ("*/*.pt", r"mp_rank_(?P<tensor>\d+)(_(?P<place>\d+))?/model_optim_rng\.pt"),
    ("layer_*.pt", r"layer_(?P<place>\d+)-model_(?P<tensor>\d+)-model_states\.pt"),
    ("mp_rank_*.pt", r"mp_rank_(?P<tensor>\d+)(?P<place>)_model_states\.pt"),
)
"""Files of weights, by tensor rank and by stage or layer; the first form of which there are some is taken."""


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a folder of some; else the folder itself."""
    inside = [path for path in folder.iterdir() if path.is_dir()]
    numbered = [(int(found[2]), path) for path in inside if (found := re.fullmatch(_CHECKPOINT, path.name))]
    release = [path for path in inside if path.name == "release"]
    return max(numbered)[1] if numbered else [*release, folder][0]


def _files(folder: Path) -> tuple[Path, dict[int, list[Path]]]:
    """The checkpoint that is meant, and each tensor rank's files in the order of the forward pass.

    Raises:
        CheckpointError: there is none, or a rank's file is missing.
    """
    path = _newest(folder)
    forms = ({file: re.fullmatch(name, str(file.relative_to(path))) for file in path.glob(how)} for how, name in FILES)
    form = next((form for form in forms if any(form.values())), {})
    found = {(int(name["tensor"]), int(name["place"] or 0)): file for file, name in form.items() if name}
    tensors, places = ({place[i] for place in found} for i in (0, 1))
    if not found or len(found) != len(tensors) * len(places):
        raise CheckpointError(
            f"{path} has {len(found)} files of weights, of {len(tensors)} tensor-parallel ranks and {len(places)} "
            "stages or layers: some are missing, or it is no checkpoint of Megatron-LM's legacy format or of "
            "Megatron-DeepSpeed"
        )
    return path, {rank: [found[rank, place] for place in sorted(places)] for rank in sorted(tensors)}


def _read(path: Path, ranks: Mapping[int, list[Path]]) -> tuple[Namespace, float, list[Weights]]:
    """The arguments, the version, and each tensor rank's weights by our names.

    Raises:
        CheckpointError: a file cannot be read, or holds something else.
    """
    arguments, version = None, 0.0
    by_rank: list[Weights] = []
    for files in ranks.values():
        weights: dict[str, torch.Tensor] = {}
        counted = 0
        for content, file in ((load_torch_file(file), file) for file in files):
            if not isinstance(content, dict):
                raise CheckpointError(f"{file} holds no state of a model")
            arguments = content.get("args", arguments)
            version = content.get("checkpoint_version", version)
            for one in _models_in(content):
                found = dict(_named(one, counted))
                weights |= found
                counted += len({name.split(".")[1] for name in found if name.startswith("layers.")})
        by_rank.append(weights)
    states = path / "mp_rank_00_model_states.pt"
    if arguments is None and states.is_file():
        content = load_torch_file(states)
        arguments, version = content.get("args"), content.get("checkpoint_version", 3.0)
    if not isinstance(arguments, Namespace) or type(version) not in (int, float):
        raise CheckpointError(f"{path} does not hold the arguments of the run, which describe the model")
    return arguments, version, by_rank


def _models_in(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The state of one model, or of the one layer that a file of DeepSpeed's pipelines holds, named as in a model.

    Raises:
        CheckpointError: of several virtual stages: their layers alternate between files.
    """
    if "model0" in content:
        raise CheckpointError("its stages have several virtual stages each; save it once without them")
    state = content.get("model", content.get("module", content))
    if not isinstance(state, dict):
        return
    names = {str(name) for name in state}
    if names <= {"weight", "bias"}:
        yield {"final_norm": state}
    elif any(name.startswith(("self_attention.", "attention.")) for name in names):
        yield {"layers.0": state}
    else:
        yield state


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dictionaries, as Megatron-LM's older models save themselves."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            yield name, value


def _named(state: Mapping[str, Any], counted: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by our names.

    Args:
        counted: blocks in the stages before this one, which number theirs from 0.

    Raises:
        CheckpointError: a tensor that none of our parameters is.
    """
    for name, tensor in _flat(state):
        while found := _PREFIX.match(name):
            name = name[found.end() :]
        layer = _LAYER.fullmatch(name)
        table, inner = (OURS_IN_BLOCK, layer[2]) if layer else (OURS, name)
        theirs = next((theirs for theirs in table if _begins(inner, theirs)), None)
        if theirs is None:
            raise CheckpointError(f"tensor {printable(name[:80])!r} has no place in a model as gptpar knows it")
        prefix = f"layers.{int(layer[1]) + counted}." if layer else ""
        yield f"{prefix}{table[theirs]}{inner.removeprefix(theirs)}", tensor


def _begins(name: str, table_name: str) -> bool:
    return name == table_name or name.startswith(table_name if table_name.endswith("_") else f"{table_name}.")


def _model_of(arguments: Namespace, rows: int, path: Path) -> ModelConfig:
    """The model that Megatron's arguments describe.

    Args:
        rows: of the vocabulary.

    Raises:
        CheckpointError: with all reasons why gptpar cannot compute the same.
    """
    given = vars(arguments)
    problems = [f"it has {what} (--{name.replace('_', '-')})" for name, what in ABSENT_HERE.items() if given.get(name)]
    values = _values(given) | {"padded_vocab_size": rows}
    layers = values.get("num_layers")
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        problems.append(f"it has {printable(str(layers)[:80])} layers; there can be 1 to {MAX_LAYERS:,}")
        values["num_layers"] = 1
    try:
        flags = ModelFlags(**values)
        problems += check_model(Flags(model=flags))
        if not problems:
            return complete_model(flags, TokenizerConfig())
    except (TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
        problems.append(f"its arguments are not those of a GPT: {printable(str(error)[:200])}")
    raise CheckpointError(f"gptpar cannot compute what the model in {path} does:\n" + "\n".join(problems))


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments as fields of our flags: most have one name."""
    known = {spec.name for spec in fields(ModelFlags)} - {"preset", "make_vocab_size_divisible_by", "window_pattern"}
    values: dict[str, Any] = {
        name: value for name, value in given.items() if name in known and isinstance(value, PLAIN)
    }
    values["normalization"] = NORMS.get(str(given.get("normalization")), "LayerNorm")
    values.setdefault("norm_epsilon", given.get("layernorm_epsilon", 1e-5))
    if given.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    tanh = given.get("bias_gelu_fusion") or given.get("openai_gelu")
    values["mlp_activation"] = "squared_relu" if given.get("squared_relu") else "gelu_tanh" if tanh else "gelu"
    if not given.get("group_query_attention"):
        values["num_query_groups"] = given.get("num_key_value_heads") or given.get("num_attention_heads")
    window = given.get("window_size")
    if isinstance(window, list | tuple) and window and window[0] >= 0:  # tokens before the token itself
        values["window_size"] = window[0] + 1
    return values


def _mismatches(
    parts: Mapping[str, list[torch.Tensor]], infos: Mapping[str, ParameterInfo], num_ranks: int
) -> Iterator[str]:
    """What is missing, has no place, or does not have as many elements as our parameter."""
    yield from (f"{name!r} is missing" for name in sorted(infos.keys() - parts.keys()))
    yield from (f"{name!r} has no place in the model" for name in sorted(parts.keys() - infos.keys()))
    for name in sorted(parts.keys() & infos.keys()):
        info, found = infos[name], parts[name]
        whole = sum(part.numel() for part in found) if info.split is not None else found[0].numel()
        if whole != info.shape.numel() or len(found) != num_ranks:
            sizes = [list(part.shape) for part in found]
            yield f"{name!r} is {list(info.shape)} in the model, and the {num_ranks} ranks have {sizes}"
