"""The model split over tensor ranks against the whole one: loss and every gradient, in fp64."""

from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gptpar.model.dropout import layers_with_dropout, seed_fields
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.tensor_parallel import TensorAxis, cross_entropy
from gptpar.tensor_parallel.axis import copy_to, gather_tokens, scatter_sum_tokens, sum_over
from gptpar.topology.initial_values import draw
from gptpar.topology.mesh import TENSOR
from tests.helpers import inits_of_stage, random_tokens, tiny_config
from tests.spawn import spawn

LLAMA = "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
MODELS = {  # flags, and which fields the micro-batch has beside labels
    "gpt2": ("", ()),
    "llama": (f"{LLAMA} {UNTIED} --num-query-groups 2", ()),
    "head norms": ("--qk-layernorm", ()),
    "llama with head norms": (f"{LLAMA} {UNTIED} --num-query-groups 2 --qk-layernorm", ("loss_mask",)),
    "documents": ("", ("loss_mask", "position_ids", "cu_seqlens")),
    "rotary documents": ("--position-embedding-type rope", ("position_ids", "cu_seqlens")),
}
OPTIONS = {  # the same of options that few models have
    "norm of all heads": (f"{LLAMA} {UNTIED} --num-query-groups 4 --qk-layernorm --qk-layernorm-scope width", ()),
    "norm of all heads of two groups": (
        f"{LLAMA} --num-query-groups 2 --qk-layernorm --qk-layernorm-scope width --norm-placement post",
        (),
    ),
    "norms after": ("--norm-placement post", ()),
    "norms before and after": ("--norm-placement peri", ()),
    "parallel residual, exact GELU": ("--use-parallel-residual --mlp-activation gelu", ()),
    "GEGLU": ("--mlp-activation geglu_tanh", ()),
    "gated attention": ("--attention-output-gate --num-query-groups 2 --squared-relu", ()),
    "gated attention with head norms": (f"{LLAMA} --attention-output-gate --qk-layernorm", ()),
    "windows": ("--window-size 5 --window-pattern SF", ("cu_seqlens",)),
    "layers without positions, YaRN": (
        f"{LLAMA} --num-query-groups 2 --no-rope-freq 2 --rope-scaling-type yarn --original-max-position-embeddings 8 "
        "--yarn-beta-fast 2",
        ("position_ids", "cu_seqlens"),
    ),
    "capped logits, z-loss": ("--logit-softcap 2 --z-loss-weight 0.1", ("loss_mask",)),
    "ranks of padding alone": ("--pad-vocab-size-to 128 --logit-softcap 2 --z-loss-weight 0.1", ("loss_mask",)),
    "untied, z-loss": (f"{UNTIED} --z-loss-weight 0.1", ()),
    "muP": (f"{UNTIED} --mup --mup-base-hidden-size 8 --mup-base-kv-channels 4", ()),
}
DROPOUTS = {  # whose masks are the whole model's
    "dropped hidden states": ("--hidden-dropout 0.5", ()),
    "dropped attention": ("--attention-dropout 0.5", ()),
    "dropout of groups": ("--attention-dropout 0.3 --hidden-dropout 0.2 --num-query-groups 2", ()),
    "dropout in documents": ("--attention-dropout 0.3 --hidden-dropout 0.2", ("cu_seqlens",)),
}
THREE = "--num-attention-heads 3 --hidden-size 24 --ffn-hidden-size 96 --seq-length 24 --swiglu"
UNEVEN = {"64 pieces over three ranks": (THREE, ("loss_mask",))}
EVERY = MODELS | OPTIONS | DROPOUTS | UNEVEN
AGAIN = {
    "GEGLU": ("mlp_act",),
    "norm of all heads": ("mlp_act", "layernorm"),
    "norms after": ("mlp_act",),
    "dropout of groups": ("core_attn", "mlp"),
}
"""What split models compute again; the whole ones keep it."""
SAMPLES = 2
EDGES = torch.tensor([15, 16, 20, 21, 31, 32, 41, 42, 47, 48])
"""The last and first pieces of neighbouring ranks' shares of 64, for two, three and four ranks."""
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def micro_batch(wanted: tuple[str, ...], length: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Tokens, and the fields that the layers want; two documents a sample, cut at different places."""
    tokens = random_tokens(SAMPLES, length, 60)
    tokens[0, 1 : 1 + len(EDGES)] = EDGES
    cuts = torch.tensor([6, 11])[:, None]
    place = torch.arange(length).expand(SAMPLES, length)
    fields: dict[str, Any] = {
        "loss_mask": (torch.arange(SAMPLES * length).view(SAMPLES, length) % 5 != 0).double(),
        "cu_seqlens": torch.tensor([0, 6, length, length + 11, 2 * length], dtype=torch.int32),
        "position_ids": torch.where(place >= cuts, place - cuts, place),
    }
    kept = {name: fields[name] for name in wanted}
    return tokens[:, :-1], {"labels": tokens[:, 1:], "seq_length": length, **kept}


def build(flags: str, axis: TensorAxis, recompute: tuple[str, ...] = ()) -> Stage:
    """The model with initial values that depend on names alone, each rank with its share; biases and norms too."""
    stage = Stage(gpt_model(tiny_config(flags).model, axis, recompute_modules=frozenset(recompute)).specs)
    inits, splits, storage = inits_of_stage(stage), global_splits(stage), {}
    for name, parameter in stage.global_parameters().items():
        shape = list(parameter.shape)
        if name in splits:
            shape[splits[name].dim] = splits[name].full
        full = draw(inits[name], torch.Size(shape), 3, name).double()
        full += 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        if name in splits:
            split = splits[name]
            full = full.narrow(split.dim, split.start, parameter.shape[split.dim])
        storage[name] = full.clone()
    stage.place(storage)
    return stage.train()


def global_splits(stage: Stage) -> dict[str, Any]:
    infos = stage.infos()
    return {name: info.placement.value[TENSOR] for name, info in infos.items() if info.placement.value}


def loss_and_whole_gradients(stage: Stage, axis: TensorAxis, wanted: tuple[str, ...], length: int = 16) -> Result:
    """Gradients put together from the shares; those of whole parameters are summed where that is declared."""
    tokens, fields = micro_batch(wanted, length)
    seeds = seed_fields(layers_with_dropout(stage.specs), 7, 0, 0, torch.device("cpu"))
    loss = stage(tokens, {**fields, **seeds})
    parameters, splits, infos = stage.global_parameters(), global_splits(stage), stage.infos()
    found = torch.autograd.grad(loss, list(parameters.values()))
    whole, shares = {}, [{}] * axis.size
    if axis.size > 1:  # one message: to pickle each tensor takes longer than to form it
        dist.all_gather_object(shares, {n: grad for n, grad in zip(parameters, found, strict=True) if n in splits})
    for (name, parameter), grad in zip(parameters.items(), found, strict=True):
        if axis.size == 1:
            whole[name] = grad
        elif name in splits:
            whole[name] = torch.cat([share[name] for share in shares], splits[name].dim)
        else:
            whole[name] = grad.clone()
            if TENSOR in infos[name].placement.gradient_sum:
                dist.all_reduce(whole[name])
        assert parameter.shape == grad.shape
    return loss.detach(), whole


def axis_of(rank: int, size: int, sequence_parallel: bool) -> TensorAxis:
    return TensorAxis(size, rank, dist.group.WORLD, sequence_parallel)


def loss_and_gradients_of(name: str, axis: TensorAxis, recompute: tuple[str, ...] = ()) -> Result:
    flags, wanted = EVERY[name]
    length = 24 if name in UNEVEN else 16  # that all ranks can share
    return loss_and_whole_gradients(build(flags, axis, recompute), axis, wanted, length)


def split_models(rank: int, size: int, names: list[str]) -> dict[tuple[str, bool], Result]:
    """Every model with and without sequence parallelism, its loss in several chunks of tokens."""
    torch.manual_seed(rank)  # of no effect
    cross_entropy.CHUNK_BYTES["cpu"] = 64 * 8 * 5
    found = {}
    for name in names:
        for sequence_parallel in (False, True):
            axis = axis_of(rank, size, sequence_parallel)
            found[name, sequence_parallel] = loss_and_gradients_of(name, axis, AGAIN.get(name, ()))
    return found


def assert_equal(got: Result, wanted: Result, what: object) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-12, atol=0, msg=lambda m: f"{what}: loss: {m}")
    assert got[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(
            got[1][name], grad, rtol=1e-10, atol=1e-13, msg=lambda m, name=name: f"{what}: {name}: {m}"
        )


NAMES = {
    2: [*MODELS, *OPTIONS, *DROPOUTS],
    3: list(UNEVEN),
    4: ["gpt2", "documents", "norm of all heads", "capped logits, z-loss", "ranks of padding alone"],
}


@pytest.mark.parametrize("size", NAMES)
def test_split_models_equal_the_whole_one(size: int) -> None:
    names = NAMES[size]
    expected = {name: loss_and_gradients_of(name, TensorAxis()) for name in names}
    for rank, results in enumerate(spawn(split_models, size, size, names)):
        assert len(results) == 2 * len(names)
        for (name, sequence_parallel), got in results.items():
            assert_equal(got, expected[name], (name, sequence_parallel, rank))


COLLECTIVES = sum_over, copy_to, gather_tokens, scatter_sum_tokens
COMPILED = "--num-layers 1 --normalization RMSNorm --swiglu --num-query-groups 2 --qk-layernorm "
COMPILED += "--qk-layernorm-scope width --norm-placement peri --attention-output-gate"


def compiled(rank: int, backend: str) -> Result:
    """A block's loss and gradients; those of each collective are compared here."""
    axis = axis_of(rank, 2, False)
    for collective in COLLECTIVES:
        calls = [lambda x, through=collective: through(x.sin() * 2, axis).cos().sum()]
        calls.append(torch.compile(calls[0], backend=backend))
        x = torch.arange(8.0).view(4, 2).add(rank).requires_grad_()
        one, other = (torch.autograd.grad(call(x), x)[0] for call in calls)
        torch.testing.assert_close(one, other)
        assert one.any()
    axis, graphs = axis_of(rank, 2, True), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    stage = build(COMPILED, axis)
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        stage.compile_layers(["layers.0"])
    found = loss_and_whole_gradients(stage, axis, ())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    return found


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_block_and_compiled_collectives_give_the_same(backend: str) -> None:
    """inductor compiles C++ for a minute; the other backend traces forward and backward passes as it does."""
    expected = loss_and_whole_gradients(build(COMPILED, TensorAxis()), TensorAxis(), ())
    for rank, found in enumerate(spawn(compiled, 2, backend, timeout_s=900.0)):
        assert_equal(found, expected, ("compiled", rank))


@pytest.mark.fast
@pytest.mark.parametrize(("length", "size"), [(64, 3), (7, 4), (5, 5), (50_257, 8)])
def test_ranges_are_balanced_and_cover(length: int, size: int) -> None:
    axes = [TensorAxis(size, rank) for rank in range(size)]
    spans = [axis.range_of(length) for axis in axes]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])] and spans[-1][1] == length
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1
    assert {axis.split_of(0, length).longest for axis in axes} == {max(sizes)}
